"""One copy of frozen weights in several processes: the same model, the same training, and memory that is there once."""

import copy
import os
import re
from pathlib import Path

import pytest
import torch
from builders import ARCHITECTURES, make_model, make_request, make_tokenizer
from children import in_children
from torch import nn
from trainings import final_weights, train_untimed
from transformers import AutoConfig, AutoModelForCausalLM

from luffy.config.knobs import LoraConfig, ModelConfig
from luffy.models import shared
from luffy.models.four_bit import FourBitLinear, unpacked
from luffy.models.load import load_model, read_model
from luffy.models.plain import runs_plain
from luffy.models.shared import VARIABLE, Base, MemoryFile, share, taken
from luffy.rollout.native import NativeEngine
from luffy.train.weights import Export, fingerprint, load_policy

pytest.importorskip("peft")
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="shared on Linux alone")
NF4 = {"rank": 4, "quantize": "nf4"}


@pytest.fixture
def shares(monkeypatch):
    """``shares(base)``: from then on, this process finds a model of a holder, here itself."""
    files = []

    def start(base):
        files.append(MemoryFile())
        share(read_model(base), base, files[-1].environment)
        assert files[-1].is_written
        monkeypatch.setenv(VARIABLE, files[-1].environment[VARIABLE])
        return files[-1]

    yield start
    for file in files:
        file.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name in ARCHITECTURES:
        made[name] = tmp_path_factory.mktemp(name)
        make_model(name).save_pretrained(made[name])
        make_tokenizer().save_pretrained(made[name])
    return made


def everything(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_model_is_the_one_that_is_loaded(folders, shares, name, dtype):
    base = Base(str(folders[name]), dtype, "cpu")
    shares(base)
    states = []
    for frozen in (False, True):
        torch.manual_seed(3)
        states.append((load_model(base.path, dtype, frozen=frozen), torch.get_rng_state()))
    (loaded, drawn), (model, drawn_too) = states
    assert torch.equal(drawn, drawn_too), "adapters would begin otherwise"
    ours, theirs = everything(model), everything(loaded)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value) and ours[key].dtype == value.dtype, key
        assert ours[key].requires_grad == value.requires_grad
        assert ours[key].data_ptr() % 64 == 0
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert model.config.to_dict() == loaded.config.to_dict()
    assert model.generation_config.to_dict() == loaded.generation_config.to_dict()


@pytest.mark.filterwarnings("ignore:.*its own forward pass")
def test_a_model_that_luffys_attention_does_not_serve_runs_as_if_loaded(shares, tmp_path):
    settings = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                "num_attention_heads": 4, "num_key_value_heads": 2, "logit_scale": 0.3}  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model("cohere", **settings)).save_pretrained(tmp_path)
    shares(Base(str(tmp_path), "float32", "cpu"))
    models = [load_model(tmp_path, frozen=frozen) for frozen in (False, True)]
    assert [runs_plain(model) for model in models] == [True, True]
    logits = [model(torch.tensor([[5, 6, 7]])).logits for model in models]
    assert torch.equal(*logits)


def test_nobody_else_sees_what_a_process_writes(folders, shares):
    base = Base(str(folders["llama"]), "float32", "cpu")
    file = shares(base)
    before = os.pread(file.number, 1 << 30, 0)
    one, other = taken(base), taken(base)
    with torch.no_grad():
        for tensor in everything(one).values():
            tensor.add_(1)
    assert fingerprint(other.parameters()) == fingerprint(load_model(base.path).parameters())
    assert os.pread(file.number, 1 << 30, 0) == before


def is_mapped(tensor, file):
    """Whether a tensor lies in the file's memory."""
    inode = f" {os.fstat(file.number).st_ino} "
    places = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if inode in line]
    return any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in places)


def test_only_frozen_parameters_lie_in_shared_memory(folders, shares):
    """Not those that a training writes to, on a GPU for all to see, and not buffers, which a model may write to."""
    file = shares(Base(str(folders["llama"]), "float32", "cpu"))
    knobs = {"path": str(folders["llama"]), "dtype": "float32", "device": "cpu"}
    adapted = load_policy(ModelConfig(**knobs, lora=LoraConfig(rank=2)), "cpu")
    assert all(is_mapped(p, file) is not p.requires_grad for p in adapted.parameters())
    assert [is_mapped(b, file) for b in adapted.buffers()] == [False] * 2
    trained = load_policy(ModelConfig(**knobs), "cpu")
    assert not any(is_mapped(tensor, file) for tensor in everything(trained).values())


def test_four_bits(folders, shares):
    pytest.importorskip("bitsandbytes")
    base = Base(str(folders["qwen2"]), "float32", "cpu", four_bits=True)
    shares(base)
    models = [load_model(base.path, four_bits=True, frozen=frozen) for frozen in (False, True)]
    loaded, model = ([m for m in one.modules() if isinstance(m, FourBitLinear)] for one in models)
    assert len(model) == len(loaded) > 0
    copied = [m for m in copy.deepcopy(models[1]).modules() if isinstance(m, FourBitLinear)]
    for ours, again, theirs in zip(model, copied, loaded, strict=True):
        assert type(ours.weight) is type(theirs.weight) and not ours.weight.requires_grad
        assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(unpacked(ours.weight), unpacked(theirs.weight))
        assert torch.equal(unpacked(again.weight), unpacked(theirs.weight))


@pytest.mark.parametrize("lora", [{"rank": 4}, {"rank": 4, "target_modules": ["q_proj"]}, NF4])
def test_a_training_and_its_resumption_are_those_of_a_loaded_base(make_config, shares, monkeypatch, lora):
    """Without the file of the weights, which only the holder has read."""
    if "quantize" in lora:
        pytest.importorskip("bitsandbytes")
    changes = {"model": {"lora": lora}, "optim": {"lr": 1e-2}}
    loads = make_config(name="loads", **changes)
    expected = train_untimed(loads), final_weights(loads)
    file = shares(Base(loads.model.path, "float32", "cpu", four_bits="quantize" in lora))
    before = os.pread(file.number, 1 << 30, 0)
    monkeypatch.setattr("luffy.models.load.read_model", None)
    train_untimed(make_config(name="shares", train={"steps": 2}, **changes))
    rows = train_untimed(shared_run := make_config(name="shares", **changes))
    assert rows == expected[0]
    weights = final_weights(shared_run)
    assert weights.keys() == expected[1].keys()
    assert all(torch.equal(weights[name], value) for name, value in expected[1].items())
    assert os.pread(file.number, 1 << 30, 0) == before


def test_a_copied_export_is_of_its_own(make_config, shares, tmp_path):
    cfg = make_config(model={"lora": {"rank": 4}})
    shares(Base(cfg.model.path, "float32", "cpu"))
    model = load_policy(cfg.model, "cpu")
    export = Export(model, make_tokenizer(), (1,), lora=True).copied()
    export.write(tmp_path)
    original = dict(load_model(cfg.model.path).named_parameters())
    written = dict(load_model(tmp_path / "model").named_parameters())
    assert all(torch.equal(written[name], value) for name, value in original.items())


def test_what_is_not_there_is_loaded(folders, shares, monkeypatch, caplog):
    base = Base(str(folders["llama"]), "float32", "cpu")
    file = shares(base)
    assert taken(Base(base.path, "bfloat16", "cpu")) is None and not caplog.records
    assert taken(base) is not None
    place, _, key = os.environ[VARIABLE].rpartition(" ")
    for wrong in (f"{place} {'00' * len(file.key)}", f"/proc/{os.getpid()}/fd/999999 {key}", "x"):
        monkeypatch.setenv(VARIABLE, wrong)
        caplog.clear()
        assert load_model(base.path, frozen=True) is not None
        assert [record.message.count("the shared one cannot be read") for record in caplog.records] == [1]
    unfinished = MemoryFile()
    os.ftruncate(unfinished.number, 4096)
    monkeypatch.setenv(VARIABLE, unfinished.environment[VARIABLE])
    assert taken(base) is None and not unfinished.is_written
    unfinished.close()
    monkeypatch.delenv(VARIABLE)
    assert taken(base) is None


def test_a_file_says_that_it_is_written_when_all_of_it_is(folders, monkeypatch):
    base, file, seen, bytes_in = Base(str(folders["llama"]), "float32", "cpu"), MemoryFile(), [], shared._bytes_in
    monkeypatch.setattr(shared, "_bytes_in", lambda *where: seen.append(file.is_written) or bytes_in(*where))
    share(read_model(base), base, file.environment)
    assert seen and not any(seen) and file.is_written
    file.close()


def test_weights_that_are_parts_of_one_are_there_once(monkeypatch):
    """As those of heads that a decoder has merged."""
    whole, file, base = torch.randn(6, 4), MemoryFile(), Base("x", "float32", "cpu")
    model = nn.ModuleList([nn.Linear(4, rows, bias=False) for rows in (4, 2)])
    for module, part in zip(model, whole.split([4, 2]), strict=True):
        module.weight = nn.Parameter(part, requires_grad=False)
    share(model, base, file.environment)
    monkeypatch.setenv(VARIABLE, file.environment[VARIABLE])
    one, other = (module.weight for module in taken(base))
    assert torch.equal(torch.cat([one, other]), whole)
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    file.close()


def test_a_handle_of_a_process_that_ended_is_not_opened(folders, monkeypatch, shares):
    base = Base(str(folders["llama"]), "float32", "cpu")
    loads = shared.pickle.loads
    shares(base)

    def of_a_gpu(data):
        found, _, pickled, handles, sizes = loads(data)
        return found, 2**22 + 1, pickled, [(0, b"", 1, 0, b"", 0) for _ in handles], sizes

    monkeypatch.setattr(shared.pickle, "loads", of_a_gpu)
    with pytest.raises(ValueError, match="is gone"):
        shared._read(base)


def lies_in(path, four_bits):
    """Of a policy that has drawn tokens in this process: inodes of shared memory, bytes of it that the process has a
    copy of, and bytes of the policy's frozen weights that lie elsewhere."""
    quantize = "nf4" if four_bits else None
    model = load_policy(ModelConfig(path=path, dtype="bfloat16", lora=LoraConfig(rank=2, quantize=quantize)), "cpu")
    NativeEngine(model, 2).generate([make_request((5, 6, 7)), make_request((5, 6))])
    inodes, copied, places = set(), 0, []
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M):
        if "/memfd:luffy-base" in part:
            begin, end = (int(number, 16) for number in part.split(maxsplit=1)[0].split("-"))
            places.append(range(begin, end))
            inodes.add(part.split()[4])
            copied += 1024 * int(re.search(r"^Anonymous:\s+(\d+) kB", part, re.M)[1])
    frozen = [p for p in model.parameters() if not p.requires_grad]
    states = [p.quant_state for p in frozen if hasattr(p, "quant_state")]
    frozen += [tensor for state in states for tensor in (state.absmax, state.code, state.state2.absmax)]
    elsewhere = [t for t in frozen if not any(t.data_ptr() in place for place in places)]
    return sorted(inodes), copied, sum(t.numel() * t.element_size() for t in elsewhere)


@pytest.mark.parametrize("four_bits", [False, True])
def test_two_processes_have_the_weights_once(folders, shares, four_bits):
    if four_bits:
        pytest.importorskip("bitsandbytes")
    path = str(folders["qwen2"])
    shares(Base(path, "bfloat16", "cpu", four_bits=four_bits))
    (inodes, *rest), (inodes_too, *rest_too) = in_children(lies_in, [(path, four_bits)] * 2)
    assert inodes == inodes_too and len(inodes) == 1
    assert rest == rest_too == [0, 0]
