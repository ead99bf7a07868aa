"""``luffy quickstart``: a generated task and a tiny base model on which the methods can be compared in minutes."""
