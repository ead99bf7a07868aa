"""vLLM beyond one process, on one GPU: a server that gets weights over NCCL, and an engine in each of two trainer ranks.

Skipped where vLLM is not installed. Weights move by a large step at every update, so an engine that missed a push would
show in the next step's log-probs.
"""

import json
import os
import secrets
import subprocess
import sys
import time

import pytest
import torch
from builders import make_tokenizer
from features import base_config, note_seen
from ranks import TESTS, run_ranks
from trainings import train, untimed_metrics
from transformers import LlamaConfig, LlamaForCausalLM

from luffy.config import to_yaml
from luffy.rollout.policy_weights import checkpoint_weights
from luffy.rollout.vllm.http_client import Server, ServerLost
from luffy.rollout.vllm.transfer import free_port, group_joiner
from luffy.train.loop import Trainer

pytest.importorskip("vllm")

KEY = "LUFFY_VLLM_KEY"
# The memory of the cache is given: vLLM would take what other processes of this GPU hold for its own.
VLLM = {"api_key_env": KEY, "args": {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}, "memory_fraction": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Wide enough for vLLM's attention kernels."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(make_tokenizer()), hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def vllm_config(make_config, sums, model, name, parallel=None, **vllm):
    cfg = base_config(
        make_config, sums, name,
        model={"path": str(model), "device": "cuda", "dtype": "bfloat16"},
        optim={"lr": 1e-3, "eps": 1e-8},
        rollout={"engine": "vllm", "vllm": {**VLLM, **vllm}},
        algorithm={"mismatch_correction": "truncated"},
        train={"steps": 4, "save_every": 4},
        **({"parallel": parallel} if parallel else {}),
    )  # fmt: skip
    return cfg


def check_vllm_run(cfg):
    rows = untimed_metrics(cfg)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["rollout/logprob_diff_mean"] < 0.03 for row in rows), [r["rollout/logprob_diff_mean"] for r in rows]
    assert abs(rows[-1]["actor/entropy_loss"] - rows[0]["actor/entropy_loss"]) > 0.1  # a missed push would show


@pytest.fixture
def server(make_config, sums, model, tmp_path, monkeypatch):
    """`luffy serve` on this GPU: for NCCL another machine than the trainer."""
    monkeypatch.setenv(KEY, secrets.token_hex(16))
    monkeypatch.setenv("NCCL_HOSTID", "trainer")
    port = free_port("127.0.0.1")
    recipe, log = tmp_path / "served.yaml", tmp_path / "server.log"
    recipe.write_text(
        to_yaml(vllm_config(make_config, sums, model, "served", transfer="nccl", servers=[f"http://127.0.0.1:{port}"]))
    )
    env = os.environ | {
        "NCCL_HOSTID": "server",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "luffy", "serve", str(recipe), "--port", str(port)]
    with log.open("w") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as process:
        client, deadline = Server(f"http://127.0.0.1:{port}", os.environ[KEY], timeout_s=60), time.monotonic() + 200
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                client.check_health()
                break
            except ServerLost:
                time.sleep(0.5)
        yield client
        process.terminate()


class Counted:
    """The trainer's end of the group, with its messages and bytes counted."""

    def __init__(self, group, counts):
        self.group, self.counts = group, counts

    def broadcast(self, tensor, src):
        self.counts["messages"] += 1
        self.counts["bytes"] += tensor.nbytes
        self.group.broadcast(tensor, src=src)


def test_a_server_gets_every_version_over_nccl(make_config, sums, model, server, monkeypatch):
    counts, join = {"messages": 0, "bytes": 0}, group_joiner()
    monkeypatch.setattr("luffy.rollout.vllm.transfer.group_joiner", lambda: lambda *at: Counted(join(*at), counts))
    cfg = vllm_config(make_config, sums, model, "trainer", transfer="nccl", nccl_host="127.0.0.1", servers=[server.url])
    with Trainer(cfg) as trainer:
        weights = checkpoint_weights(trainer.model)
        tensors, size = len(weights), sum(w.base.nbytes for w in weights)
        trainer.train()
    check_vllm_run(cfg)
    pushes = counts["messages"] // tensors
    print(f"\n{pushes} pushes of {tensors} tensors: {json.dumps(counts)}")
    assert counts == {"messages": pushes * tensors, "bytes": pushes * size} and pushes >= 5
    note_seen("vLLM server, weights over NCCL", "one process", "1")


def test_two_trainer_ranks_share_a_server(make_config, sums, model, server):
    parallel = {"workers": 2, "rollout_group": 2}
    servers = {"transfer": "nccl", "nccl_host": "127.0.0.1", "servers": [server.url]}
    cfg = vllm_config(make_config, sums, model, "sharing", **servers)
    many = make_with(make_config, cfg, launch="torchrun", parallel=parallel)
    run_ranks(2, train, many, device="cuda")
    check_vllm_run(many)
    note_seen("vLLM server, weights over NCCL", "torchrun, NCCL", "2")


def make_with(make_config, cfg, **changes):
    from luffy.schema import to_dict

    return make_config(**to_dict(cfg) | changes)


@pytest.mark.parametrize("group", [1, 2], ids=["each_has_one", "one_for_both"])
def test_engines_of_two_ranks(make_config, sums, model, monkeypatch, group):
    monkeypatch.setenv(KEY, "unused")
    cfg = vllm_config(make_config, sums, model, "colocated")
    many = make_with(make_config, cfg, launch="torchrun", parallel={"workers": 2, "rollout_group": group})
    run_ranks(2, train, many, device="cuda")
    check_vllm_run(many)
    note_seen({1: "vLLM in every process", 2: "one vLLM for a rollout group"}[group], "torchrun, NCCL", "2")


GATED = {"guidance": {"n_prefix": 0, "gate": "lowest_hint", "hint_text": " {solution}"}}


def test_a_gate_asks_vllm_again(make_config, sums, model, monkeypatch):
    monkeypatch.setenv(KEY, "unused")
    cfg = vllm_config(make_config, sums, model, "gated")
    gated = make_with(make_config, cfg, data={"train": str(sums), "style": "plain", "max_prompt_tokens": 24},
                      algorithm={"reject_extreme": False}, **GATED)  # fmt: skip
    train(gated)
    rows = untimed_metrics(gated)
    assert len(rows) == 4 and all(row["rollout/logprob_diff_mean"] < 0.03 for row in rows)
    assert rows[0]["batch/gated"] > 0
    note_seen("vLLM with a gate", "one process", "1")
