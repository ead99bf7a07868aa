"""What `--dry-run` estimates: bytes by hand."""

import pytest
from transformers import LlamaConfig

from luffy.rollout.native import CPU_SLOTS, GPU_SLOTS
from luffy.train import setup
from luffy.train.dry_run import cache_bytes, head_bytes
from luffy.train.engines import VLLM_SLOTS

SHAPE = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, vocab_size=1000)


@pytest.mark.parametrize(
    ("device", "engine", "slots"),
    [("cpu", "native", CPU_SLOTS), ("cuda", "native", GPU_SLOTS), ("cuda", "vllm", VLLM_SLOTS)],
)
def test_the_cache_has_the_slots_that_the_engine_would_take(make_config, monkeypatch, device, engine, slots):
    monkeypatch.setattr(setup, "pick_device", lambda wanted: device)
    many = {"n": 8, "max_tokens": 16, "slots": None, "engine": engine}
    cfg = make_config(rollout=many, batch={"problems": 4096, "tokens": 128})
    keys_and_values = 2 * 3 * 2 * (64 // 8) * 4  # layers, heads, width, bytes
    assert cache_bytes(cfg, SHAPE, 4) == keys_and_values * (16 + 16) * slots
    few = make_config(rollout=many, batch={"problems": 2, "tokens": 128})
    assert cache_bytes(few, SHAPE, 4) == keys_and_values * (16 + 16) * 2 * 8


def test_the_heads_chunk_is_a_gigabyte_on_a_gpu(make_config, monkeypatch):
    monkeypatch.setattr(setup, "pick_device", lambda wanted: "cpu")
    assert head_bytes(make_config(), 1000) == 3 * 1024 * 1000 * 4
    monkeypatch.setattr(setup, "pick_device", lambda wanted: "cuda")
    assert head_bytes(make_config(), 1000) == 2**30
