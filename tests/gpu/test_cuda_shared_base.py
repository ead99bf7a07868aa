"""Processes that share the frozen weights below adapters on one GPU, by handles of CUDA IPC."""

import json
import os
import subprocess
import sys

import pytest
import torch
from trainings import untimed_metrics
from transformers import LlamaConfig, LlamaForCausalLM

from luffy.compare.base_holder import BaseHolder
from luffy.compare.process import luffy
from luffy.config import to_yaml
from luffy.models.shared import Base

pytest.importorskip("peft")
pytestmark = pytest.mark.gpu

# Loads a policy, draws, takes a step of its adapters, draws again whenever it is told to; a line of JSON each time.
SCRIPT = """
import json, sys
import torch
from luffy.config.knobs import LoraConfig, ModelConfig
from luffy.models.forward import causal_lm
from luffy.rollout.native import NativeEngine
from luffy.train.weights import fingerprint, load_policy
from luffy.types import Request, Sampling

path, dtype, quantize, targets = json.loads(sys.argv[1])
lora = LoraConfig(rank=4, quantize=quantize, target_modules=targets)
for kind in (torch.float32, torch.bfloat16):  # workspaces of cuBLAS
    square = torch.ones(64, 64, device="cuda", dtype=kind)
    torch.nn.functional.linear(square @ square, square, square[0])
before = torch.cuda.memory_allocated()
torch.manual_seed(0)
model = load_policy(ModelConfig(path=path, dtype=dtype, device="cuda", lora=lora), "cuda")
frozen = [p for p in model.parameters() if not p.requires_grad]
engine = NativeEngine(model, 4)
taken = torch.cuda.memory_allocated() - before
base = fingerprint(frozen)
for _ in iter(sys.stdin.readline, ""):
    requests = [Request((5, 6, 7 + i), i, Sampling(24)) for i in range(4)]
    drawn = engine.generate(requests)
    print(json.dumps({
        "taken": taken, "base": base, "after": fingerprint(frozen),
        "bytes": sum(p.numel() * p.element_size() for p in frozen),
        "tokens": [r.token_ids.tolist() for r in drawn], "log_probs": [r.log_probs.tolist() for r in drawn],
        "adapters": fingerprint(p for p in model.parameters() if p.requires_grad),
    }), flush=True)
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.5  # far from what it was: a write to the base would be seen by the others
"""


class Training:
    """A process of its own."""

    def __init__(self, settings, environment):
        command = [sys.executable, "-c", SCRIPT, json.dumps(settings)]
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def draw(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()}"
        return json.loads(line)

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def trainings():
    started = []

    def start(*args):
        started.append(Training(*args))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model whose weights are much more than what else a process allocates."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=256, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def hold(tmp_path):
    started = []

    def start(path, dtype, quantize):
        base = Base(str(path), dtype, "cuda", four_bits=quantize is not None)
        started.append(BaseHolder(base, tmp_path / "holder.log", 300.0))
        assert started[-1].start(), (tmp_path / "holder.log").read_text()
        return started[-1]

    yield start
    for one in started:
        one.close()


def assert_drawn_alike(ours, theirs, dtype):
    assert (ours["base"], ours["adapters"]) == (theirs["base"], theirs["adapters"])
    assert ours["tokens"] == theirs["tokens"]
    far = [abs(a - b) for one, other in zip(ours["log_probs"], theirs["log_probs"], strict=True)
           for a, b in zip(one, other, strict=True)]  # fmt: skip
    assert max(far) <= (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize(
    ("dtype", "quantize", "targets"),
    [
        ("float32", None, "all-linear"),
        ("bfloat16", None, ["q_proj"]),  # so gate and up are multiplied as one matrix, which lies in the shared memory
        ("bfloat16", "nf4", "all-linear"),
    ],
)
def test_two_trainings_have_one_base(saved, hold, trainings, dtype, quantize, targets):
    if quantize is not None:
        pytest.importorskip("bitsandbytes")
    settings = (str(saved), dtype, quantize, targets)
    alone = trainings(settings, {}).draw()
    assert alone["taken"] > 0.99 * alone["bytes"] > 10e6
    holder = hold(saved, dtype, quantize)
    first, second = (trainings(settings, holder.environment()) for _ in range(2))
    # The allocator of a training may be another than the holder's.
    third = trainings(settings, {**holder.environment(), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    for one in (first, second, third):
        drawn = one.draw()
        assert_drawn_alike(drawn, alone, dtype)
        assert drawn["taken"] < 0.25 * alone["bytes"], (drawn["taken"], alone["bytes"])
    for one in (first, second):  # with other adapters, after one that ended
        third.end()
        drawn = one.draw()
        assert drawn["after"] == alone["base"] and drawn["adapters"] != alone["adapters"]
    late = trainings(settings, holder.environment()).draw()
    assert_drawn_alike(late, alone, dtype)


def test_a_training_goes_on_without_the_holder_and_a_new_one_is_started(saved, hold, trainings):
    settings = (str(saved), "bfloat16", None, "all-linear")
    holder = hold(saved, "bfloat16", None)
    old = holder.environment()
    running = trainings(settings, old)
    before = running.draw()
    holder._process._process.kill()
    holder._process._process.wait()
    assert running.draw()["after"] == before["base"]
    late = trainings(settings, old).draw()  # its handle leads nowhere: it loads its own
    assert_drawn_alike(late, before, "bfloat16")
    assert late["taken"] > 0.99 * late["bytes"]
    fresh = trainings(settings, holder.environment()).draw()
    assert_drawn_alike(fresh, before, "bfloat16")
    assert fresh["taken"] < 0.25 * fresh["bytes"]


def test_trainings_of_the_command_line(make_config, hold, tmp_path):
    """The first rollouts of a run that shares are those of a run that loads; both end with a checkpoint."""
    lora = {"rank": 4}
    rows = {}
    for name in ("loads", "shares"):
        cfg = make_config(model={"device": "cuda", "lora": lora}, name=name)
        (tmp_path / f"{name}.yaml").write_text(to_yaml(cfg))
        more = hold(cfg.model.path, cfg.model.dtype, None).environment() if name == "shares" else {}
        done = subprocess.run(
            luffy("train", str(tmp_path / f"{name}.yaml")), env={**os.environ, **more}, capture_output=True, text=True
        )
        assert done.returncode == 0 and "cannot be read" not in done.stderr, done.stderr
        rows[name] = untimed_metrics(cfg)
        assert (cfg.folder / "checkpoints" / "step-000004" / "adapter").is_dir()
    first = [{k: v for k, v in rows[name][0].items() if k.startswith(("rollout/", "critic/"))} for name in rows]
    assert first[0] == pytest.approx(first[1], rel=1e-4, abs=1e-5, nan_ok=True)
