"""What vLLM's engines promise beyond the conformance suite; `make test-vllm`."""

import os
import random
import signal
import threading
import time

import pytest
import torch
import vllm_engines
from builders import make_model

from luffy.errors import UserError
from luffy.rollout import NativeEngine
from luffy.rollout.vllm import colocated, transfer
from luffy.rollout.vllm.http_client import Server
from luffy.rollout.vllm.remote import RemoteEngine
from luffy.rollout.vllm.transfer import FolderTransfer
from luffy.train.build_engines import scores_of
from luffy.types import Request, Sampling

pytestmark = pytest.mark.vllm


def llama():
    return make_model("llama", hidden_size=128)


def vllm_request(seed=0, tokens=8, temperature=0.0, length=40):
    return Request(tuple(range(10, 10 + length)), seed, Sampling(tokens, temperature))


def generated_tokens(engine, *requests):
    return [c.token_ids.tolist() for c in engine.generate(requests)]


@pytest.fixture(params=["colocated", "remote"])
def engine(request):
    return getattr(vllm_engines, request.param)(llama())


def test_a_push_of_the_wrong_shape_is_refused_and_the_engine_stays_well(engine):
    before = generated_tokens(engine, vllm_request())
    mlp = engine.model.model.layers[0].mlp
    kept = mlp.up_proj.weight
    mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(3, 128))
    with pytest.raises(UserError, match=r"up_proj.weight is \[3, 128\] and must be \[128, 128\]"):
        engine.sync(9)
    assert engine.version == 0 and generated_tokens(engine, vllm_request()) == before
    mlp.up_proj.weight = kept
    engine.sync(10)
    assert engine.version == 10 and generated_tokens(engine, vllm_request()) == before


def test_a_sleeping_engine_does_not_answer_with_what_it_has():
    engine = vllm_engines.colocated(llama())
    before = generated_tokens(engine, vllm_request())
    engine.sleep()
    with pytest.raises(RuntimeError, match="call sync first"):
        engine.generate([vllm_request()])
    engine.sync(1)
    assert generated_tokens(engine, vllm_request()) == before and engine.seconds.keys() == {"sleep", "wake", "push"}


def test_weights_through_a_folder_are_the_same_as_in_memory(tmp_path):
    engine = vllm_engines.colocated(llama())
    expected = generated_tokens(engine, vllm_request())
    other = make_model("llama", seed=3, hidden_size=128)
    engine.model = other
    engine._push_folder = tmp_path
    try:
        engine.sync(1)
        assert generated_tokens(engine, vllm_request()) != expected
        engine.model = llama()
        engine.sync(2)
    finally:
        engine._push_folder = None
    assert generated_tokens(engine, vllm_request()) == expected and not list(tmp_path.rglob("weights-*"))


def test_the_trainers_random_numbers_are_left_alone():
    engine = vllm_engines.colocated(llama())
    torch.manual_seed(3)
    random.seed(3)
    state, python = torch.get_rng_state(), random.getstate()
    engine.generate([vllm_request(temperature=0.0), vllm_request(seed=4, temperature=1.0)])
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python


def test_without_request_seeds_a_batch_follows_its_first():
    engine = vllm_engines.colocated(llama())
    engine.seeded = False
    try:
        first, again, other = (
            generated_tokens(engine, *[vllm_request(seed=s + i, temperature=1.0) for i in range(3)]) for s in (5, 5, 6)
        )
    finally:
        engine.seeded = True
    assert first == again != other and len({tuple(ids) for ids in first}) == 3


def test_what_vllm_cannot_do_is_one_clear_line(engine):
    with pytest.raises(UserError, match=r"temperature must be in \[0, 2\]") as caught:
        engine.generate([vllm_request(temperature=3.0)])
    assert "\n" not in str(caught.value)


def test_a_folder_is_evaluated_with_the_weights_that_vllm_reads_itself(tmp_path, monkeypatch):
    from luffy.evaluation import engines

    vllm_engines.save_with_tokenizer(llama(), tmp_path)
    plain = engines.engine_arguments
    monkeypatch.setattr(engines, "engine_arguments", lambda **k: plain(**{**k, "args": vllm_engines.ARGUMENTS}))
    loaded = engines.load_engine("vllm", str(tmp_path), dtype="float32", device="cpu", slots=8)
    assert loaded.context == 512 and loaded.eos_ids == (2,)
    assert generated_tokens(loaded.engine, vllm_request()) == generated_tokens(
        vllm_engines.colocated(llama()), vllm_request()
    )
    with pytest.raises(RuntimeError, match="no policy"):
        loaded.engine.sync(1)


def adapted_llama(seed=0, targets="all-linear"):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(llama(), config)


@pytest.fixture(params=["colocated_adapters", "remote_adapters"])
def adapters_engine(request):
    return getattr(vllm_engines, request.param)(adapted_llama())


def test_adapters_alone_are_the_same_policy_as_merged_ones(adapters_engine, monkeypatch):
    """The same prompts before and after each push: keys and values of older adapters must not be served."""
    written = []
    real = transfer.write_weights
    for module in (transfer, colocated):
        monkeypatch.setattr(
            module, "write_weights", lambda *given, **more: written.append(given) or real(*given, **more)
        )
    requests = [vllm_request(tokens=16), *(vllm_request(seed=s, tokens=16, temperature=0.8) for s in range(3))]
    seen = []
    for version, policy in enumerate([adapted_llama(), adapted_llama(1, ["q_proj", "down_proj"]), adapted_llama(2)]):
        adapters_engine.model = policy
        adapters_engine.sync(version)
        completions = adapters_engine.generate(requests)
        seen.append([c.token_ids.tolist() for c in completions])
        greedy, *_ = NativeEngine(policy.merge_and_unload()).generate(requests)
        assert greedy.token_ids.tolist() == seen[-1][0]
        expected = scores_of(policy.get_base_model(), 0.8, 4096)(requests[1:], [c.token_ids for c in completions[1:]])
        for completion, log_probs in zip(completions[1:], expected, strict=True):
            torch.testing.assert_close(completion.log_probs, log_probs, atol=2e-5, rtol=1e-4)
    assert len({str(tokens) for tokens in seen}) == 3 and not written


def test_adapters_that_vllm_refuses_leave_those_before(adapters_engine, monkeypatch):
    before = generated_tokens(adapters_engine, vllm_request())
    kept = adapters_engine.version
    wrong = {f"base_model.model.model.nothing.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    monkeypatch.setattr(transfer, "adapter_tensors", lambda model: wrong)
    with pytest.raises((ValueError, UserError), match="expected target modules"):
        adapters_engine.sync(9)
    monkeypatch.undo()
    assert adapters_engine.version == kept
    assert generated_tokens(adapters_engine, vllm_request()) == before
    adapters_engine.sync(10)
    assert generated_tokens(adapters_engine, vllm_request()) == before


def test_every_route_of_a_server_asks_for_the_key():
    real = vllm_engines.server_for(llama())
    stranger = Server(real.url, "guessed")
    stranger.check_health()
    for call in (
        stranger.model_entry,
        lambda: stranger.rpc("luffy_state"),
        lambda: stranger.post("reset_prefix_cache", {}),
        lambda: stranger.post("sleep", {}),
        lambda: stranger.post("update_weights", {}),
    ):
        with pytest.raises(UserError, match="HTTP 401"):
            call()
    assert real.rpc("luffy_state")["config"]["hidden_size"] == 128


def test_a_server_killed_in_the_middle_costs_no_sample(tmp_path):
    model = llama()
    first, second = vllm_engines.server_for(model), vllm_engines.server_for(model, "second")
    process = vllm_engines.process_of("second")
    said = []
    engine = RemoteEngine(model, [first, second], FolderTransfer(tmp_path), max_context=512, slots=8, warn=said.append)
    engine.sync(1)
    requests = [vllm_request(seed=s, tokens=150, temperature=1.0, length=8 + s % 4) for s in range(48)]
    undisturbed = generated_tokens(engine, *requests)
    threading.Timer(0.3, lambda: os.kill(process.pid, signal.SIGKILL)).start()
    time.sleep(0.1)
    assert generated_tokens(engine, *requests) == undisturbed
    values = {name: metric.value for name, metric in engine.metrics().items()}
    assert values["rollout/servers_lost"] == 1 and values["rollout/requests_resent"] > 0
    assert len(said) == 1 and second.url in said[0]
    assert generated_tokens(engine, *requests[:4]) == undisturbed[:4]  # the other goes on alone
