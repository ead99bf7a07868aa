"""How fast it is: `luffy bench rollout|update|step`, on random weights of a given shape or a model of yours."""
