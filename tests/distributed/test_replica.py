import pytest
import torch
from builders import make_model
from transformers import AutoConfig, AutoModelForCausalLM

from luffy.distributed.replica import Replica, StaleReplica, on_host
from luffy.models.plain import choose_path, runs_plain


def test_a_replica_changes_when_it_is_refreshed_and_a_stale_one_when_it_catches_up():
    model = make_model("llama")
    replica = Replica(model, "cpu")
    stale = StaleReplica(replica.model)
    name = "model.layers.0.mlp.up_proj.weight"
    new, copied, lagging = (dict(m.named_parameters())[name] for m in (model, replica.model, stale.model))
    assert torch.equal(copied, new) and torch.equal(lagging, new)
    with torch.no_grad():
        new.add_(1.0)
    assert not torch.equal(copied, new)
    replica.refresh(model)
    assert torch.equal(copied, new) and not torch.equal(lagging, new)
    stale.catch_up()
    assert torch.equal(lagging, new)
    assert not any(p.requires_grad for p in replica.model.parameters())


def test_copies_run_as_the_original_does():
    """Cohere scales its logits, so it runs through its own forward pass; a copy that forgot that would be wrong."""
    settings = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                "num_attention_heads": 4, "num_key_value_heads": 2, "logit_scale": 0.3}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("cohere", **settings)).eval()
    with pytest.warns(UserWarning, match="own forward pass"):
        choose_path(model)
    replica = Replica(model, "cpu")
    assert runs_plain(replica.model) and runs_plain(StaleReplica(replica.model).model)
    plain = make_model("llama")
    choose_path(plain)
    assert not runs_plain(Replica(plain, "cpu").model)


def test_a_copy_on_the_host_keeps_tied_weights_one():
    model = make_model("llama")
    state = on_host(model)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert state["lm_head.weight"].abs().sum() > 0
