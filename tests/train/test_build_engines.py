"""From a config to an engine, and what the trainer asks of one that has its own copy of the weights."""

from dataclasses import replace

import pytest
import torch
from trainings import train_rows

from luffy.config import load_config
from luffy.core.losses import Importance
from luffy.errors import ConfigError, UserError
from luffy.learn.objective import importance_of
from luffy.models.load import load_model
from luffy.rollout.native import NativeEngine
from luffy.train.build_engines import (
    build_engine,
    build_evaluating,
    context_of,
    transfer_of,
    transfer_to_servers,
    vllm_arguments,
)
from luffy.train.loop import Trainer


class CopyEngine(NativeEngine):
    """Sleeps, wakes and counts as vLLM does, but generates natively; its log-probs are off by ``shift``."""

    shift = 0.0

    def __init__(self, model, **knobs):
        super().__init__(model, **knobs)
        self.log, self.asleep = [], True

    def sync(self, version):
        super().sync(version)
        self.log.append(f"sync {version}")
        self.asleep = False

    def sleep(self):
        self.log.append("sleep")
        self.asleep = True

    def close(self):
        self.log.append("close")

    def generate(self, requests, progress=None):
        assert not self.asleep, "asked while it slept"
        self.log.append("generate")
        got = super().generate(requests, progress)
        for completion in got:
            completion.log_probs.add_(self.shift)
        return got


@pytest.fixture
def copy_engine(monkeypatch):
    made = []

    def build(cfg, model, device, warn):
        made.append(CopyEngine(model, max_slots=16))
        return made[-1]

    monkeypatch.setattr("luffy.train.build_engines.build_engine", build)
    return made


def test_a_step_is_generate_sleep_update_sync_and_a_resumed_run_pushes_its_version(make_config, copy_engine):
    train_rows(make_config(train={"steps": 2}))
    assert copy_engine[0].log == [
        "sync 0", "generate", "sleep", "sync 1", "generate", "sleep", "sync 2", "close"
    ]  # fmt: skip
    rows = train_rows(make_config(train={"steps": 3}))
    assert copy_engine[1].log == ["sync 2", "generate", "sleep", "sync 3", "close"]
    assert rows[-1]["timing_s/sync"] >= 0 and "timing_s/sleep" in rows[-1]


def test_mismatch_is_measured_at_every_step(make_config, copy_engine, monkeypatch):
    rows = train_rows(make_config(train={"steps": 2}))
    for row in rows:
        assert row["rollout/logprob_diff_max"] < 1e-4 and row["rollout/ess"] == pytest.approx(1.0, abs=1e-5)
        assert "rollout/weight_mean" not in row
    monkeypatch.setattr(CopyEngine, "shift", -1.0)
    (row,) = train_rows(make_config(name="shifted", train={"steps": 1}))
    assert row["rollout/logprob_diff_mean"] == pytest.approx(1.0, abs=1e-3)
    assert row["rollout/ess"] == pytest.approx(1.0, abs=1e-3)  # all weights alike: nothing is lost, only scaled


@pytest.mark.parametrize(
    ("correction", "shift", "weight"),
    [("truncated", -0.5, torch.e**0.5), ("truncated", -3.0, 2.0), ("truncated", 3.0, torch.e**-3.0),
     ("masked", -0.5, torch.e**0.5), ("masked", -3.0, 0.0), ("masked", 3.0, 0.0)],
)  # fmt: skip
def test_the_correction_weighs_the_policys_own_tokens(make_config, copy_engine, monkeypatch, correction, shift, weight):
    """The engine claims to have drawn with p * e^shift, so p_old / p_engine is e^-shift everywhere."""
    monkeypatch.setattr(CopyEngine, "shift", shift)
    (row,) = train_rows(make_config(train={"steps": 1}, algorithm={"mismatch_correction": correction}))
    assert row["rollout/weight_mean"] == pytest.approx(weight, abs=1e-3)
    assert row["rollout/weight_max"] == pytest.approx(weight, abs=1e-3)


def test_off_is_the_plain_run_to_the_bit_whatever_the_engine_claims(make_config, copy_engine, monkeypatch):
    def losses(name, **algorithm):
        return [r["actor/loss"] for r in train_rows(make_config(name=name, train={"steps": 2}, algorithm=algorithm))]

    plain = losses("plain")
    monkeypatch.setattr(CopyEngine, "shift", -0.3)
    assert losses("claimed") == plain != losses("corrected", mismatch_correction="truncated")


def test_the_knob_becomes_bounds(make_config):
    assert importance_of(make_config()) is None
    truncated = importance_of(make_config(algorithm={"mismatch_correction": "truncated", "mismatch_cap": 4.0}))
    assert truncated == Importance(clamp_min=0.0, clamp_max=4.0)
    masked = importance_of(make_config(algorithm={"mismatch_correction": "masked", "mismatch_cap": 4.0}))
    assert masked == Importance(clamp_min=0.25, clamp_max=4.0, mask=True)
    old = torch.tensor([0.0, 0.0, 0.0, 0.0])
    behavior = -torch.log(torch.tensor([1.5, 5.0, 0.1, torch.inf]))
    torch.testing.assert_close(masked.weights(old, behavior, [4]), torch.tensor([1.5, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(truncated.weights(old, behavior, [4]), torch.tensor([1.5, 4.0, 0.1, 4.0]))


# ---- config


def test_every_argument_passes_through(make_config):
    vllm = {
        "tensor_parallel_size": 4,
        "memory_fraction": 0.7,
        "args": {"swap_space": 2, "compilation_config": {"mode": 0}},
    }
    cfg = make_config(rollout={"engine": "vllm", "vllm": vllm}, model={"dtype": "bfloat16"})
    model_config = type("C", (), {"max_position_embeddings": 128})
    got = vllm_arguments(cfg, model_config)
    assert got["tensor_parallel_size"] == 4 and got["gpu_memory_utilization"] == 0.7 and got["dtype"] == "bfloat16"
    assert (
        got["swap_space"] == 2 and got["compilation_config"] == {"mode": 0} and got["max_num_seqs"] == cfg.rollout.slots
    )
    assert got["max_model_len"] == 32 and got["logprobs_mode"] == "processed_logprobs"


def test_vllm_is_told_of_adapters_that_are_pushed_alone(make_config, monkeypatch):
    given = {"rollout": {"engine": "vllm", "vllm": {"adapters": "alone"}}, "model": {"lora": {"rank": 20}}}
    cfg = make_config(**given)
    model_config = type("C", (), {"max_position_embeddings": 128})
    got = vllm_arguments(cfg, model_config)
    assert got["enable_lora"] and got["max_lora_rank"] == 32 and got["max_loras"] == 1
    assert transfer_to_servers(cfg, "cuda") == "folder"
    monkeypatch.setattr("luffy.train.build_engines.pick_device", lambda wanted: "cuda")
    with pytest.raises(ConfigError, match=r"need model.dtype=bfloat16; set that, or rollout.vllm.adapters=merged$"):
        vllm_arguments(cfg, model_config)
    assert "enable_lora" not in vllm_arguments(make_config(), model_config)


def test_context_is_what_the_run_can_ask_for(make_config):
    model_config = type("C", (), {"max_position_embeddings": 100})
    assert context_of(make_config(), model_config) == 32
    assert context_of(make_config(eval={"max_tokens": 40}), model_config) == 56
    assert context_of(make_config(rollout={"vllm": {"max_context": 90}}), model_config) == 90
    assert context_of(make_config(rollout={"vllm": {"max_context": 5000}}), model_config) == 100
    with pytest.raises(ConfigError, match=r"max_context' \(31\) is less than .* \(32\)"):
        context_of(make_config(rollout={"vllm": {"max_context": 31}}), model_config)


def test_how_weights_travel(make_config):
    def way(device="cpu", **vllm):
        return transfer_of(make_config(rollout={"vllm": vllm}), device)

    servers = ["http://127.0.0.1:1"]
    assert way() == way("cuda") == "memory"
    assert way(tensor_parallel_size=2) == way(args={"pipeline_parallel_size": 2}) == "folder"
    assert way(servers=servers) == "folder" and way("cuda", servers=servers) == "nccl"
    assert way("cuda", servers=servers, transfer="folder") == "folder"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.vllm.args={max_model_len: 5}"], "set rollout.vllm.max_context instead"),
        (["rollout.vllm.args={logprobs_mode: raw_logprobs}"], "luffy depends on its own value"),
        (["rollout.vllm.args={api_key: abc}"], "set rollout.vllm.api_key_env instead"),
        (["rollout.vllm.args={api-key: abc}"], "set rollout.vllm.api_key_env instead"),
        (["rollout.vllm.args={api-key=abc: true}"], "no argument of vLLM"),
        (["rollout.vllm.args={trust-remote-code: true}"], "set model.trust_remote_code instead"),
        (["rollout.vllm.args={trust-remote_code: true}"], "set model.trust_remote_code instead"),
        (["rollout.vllm.args={Trust-Remote-Code: true}"], "set model.trust_remote_code instead"),
        (["rollout.vllm.args={trust-remote: true}"], "set model.trust_remote_code instead"),
        (["rollout.vllm.args={no-trust-remote-code: false}"], "set model.trust_remote_code instead"),
        (["rollout.vllm.args={-trust-remote-code: true}"], "no argument of vLLM"),
        (["rollout.vllm.args={weight-transfer-config.backend: nccl}"], "set rollout.vllm.transfer instead"),
        (["rollout.vllm.args={config: flags.yaml}"], "set rollout.vllm.args instead"),
        (["rollout.vllm.args={middleware: [--trust-remote-code]}"], "would be read as a flag"),
        (["rollout.vllm.args={seed: --trust-remote-code}"], "would be read as a flag"),
        (["rollout.vllm.transfer=nccl"], "nccl is for servers"),
        (["rollout.vllm.transfer=nccl", "rollout.vllm.adapters=alone"], "set rollout.vllm.transfer=folder"),
        (["rollout.vllm.adapters=alone"], "needs model.lora with a rank of at most 512; set it to merged"),
        (["rollout.vllm.adapters=alone", "model.lora.rank=513"], "needs model.lora with a rank of at most 512"),
        (["rollout.vllm.args={enable_lora: true}"], "set rollout.vllm.adapters instead"),
        (["rollout.vllm.transfer=memory", "rollout.vllm.tensor_parallel_size=2"], "one GPU without servers"),
        (["rollout.engine=vlm"], "did you mean 'vllm'"),
        (["algorithm.mismatch_cap=1"], "must be > 1"),
        (["algorithm.mismatch_correction=masked", "rollout.offpolicy_guidance={model_path: x}"], "mismatch_correction=off"),
        (["algorithm.mismatch_correction=masked", "async.max_staleness=1"], r"'async\.max_staleness' .*importance_clamp_max; set algorithm\.mismatch_correction=off"),
        (["algorithm.mismatch_correction=truncated", "rollout.max_tokens_per_step=9"], r"'rollout\.max_tokens_per_step' .*mismatch_correction=off"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_when_it_is_read(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_other_arguments_of_vllm_pass():
    given = {
        "enforce-eager": True,
        "kv_cache_dtype": "fp8",
        "compilation-config.level": 3,
        "model_impl": "vllm",
        "seed": -1,
    }
    assert load_config(None, {"rollout.vllm.args": given}).rollout.vllm.args == given


def test_without_vllm_the_error_says_what_to_install(make_config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cfg = make_config(rollout={"engine": "vllm"})
    with pytest.raises(UserError, match=r"pip install '\.\[vllm\]'"):
        Trainer(cfg)
    assert not cfg.folder.exists()


def test_the_key_stays_out_of_the_run_folder(make_config, monkeypatch, tiny_model):
    monkeypatch.setenv("LUFFY_VLLM_KEY", "never-write-me")
    cfg = make_config(rollout={"engine": "vllm", "vllm": {"servers": ["http://127.0.0.1:9"]}})
    with pytest.raises(UserError, match="http://127.0.0.1:9.*does not answer|does not answer.*http://127.0.0.1:9"):
        Trainer(cfg)
    from luffy.config import to_yaml

    assert "never-write-me" not in to_yaml(cfg)


def test_a_run_with_a_server_pushes_every_version_and_leaves_no_weights_behind(make_config, monkeypatch):
    """The server answers with one-digit tokens whatever it holds; the trainer measures how far off that is."""
    from fake_servers import KEY, FakeServer

    monkeypatch.setenv("LUFFY_VLLM_KEY", KEY)
    cfg = make_config(train={"steps": 2}, rollout={"engine": "vllm"}, algorithm={"mismatch_correction": "masked"})
    server = FakeServer(load_model(cfg.model.path), max_context=32, tokens=10)
    cfg = replace(cfg, rollout=replace(cfg.rollout, vllm=replace(cfg.rollout.vllm, servers=(server.url,))))
    try:
        rows = train_rows(cfg)
    finally:
        server.http.shutdown()
    assert server.version == 2 and server.calls.count("reset_prefix_cache") == 3
    assert [r["rollout/servers"] for r in rows] == [1, 1] and rows[0]["rollout/logprob_diff_mean"] > 0.1
    assert not list((cfg.folder / "weights").rglob("weights-*"))
    written = "".join(f.read_text() for f in cfg.folder.rglob("*") if f.suffix in (".yaml", ".jsonl", ".json"))
    assert KEY not in written and server.url in written


def test_native_is_what_one_gets_with_the_slots_of_the_config(make_config):
    cfg = make_config(rollout={"slots": 3})
    model = load_model(cfg.model.path)
    rolls_out, evaluates = (build(cfg, model, "cpu", print) for build in (build_engine, build_evaluating))
    assert type(rolls_out) is type(evaluates) is NativeEngine and rolls_out.max_slots == evaluates.max_slots == 3
