"""The remote engine against servers of our own making: balance, loss, restarts, keys. No vLLM needed."""

import sys
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from builders import make_model
from fake_servers import KEY, FakeServer

from luffy.errors import TrainingStopped, UserError
from luffy.rollout.policy_weights import Weight, adapter_tensors, tensors_of
from luffy.rollout.vllm.http_client import Server, key_from
from luffy.rollout.vllm.remote import RemoteEngine
from luffy.rollout.vllm.transfer import AdapterTransfer, FolderTransfer, NcclTransfer
from luffy.rollout.vllm.worker_extension import LuffyWorker, model_fields
from luffy.types import Request, Sampling


@pytest.fixture
def model():
    return make_model("llama")


@pytest.fixture
def start(model):
    made = []

    def build(**knobs):
        made.append(FakeServer(model, **knobs))
        return made[-1]

    yield build
    for server in made:
        server.http.shutdown()
        server.http.server_close()


def engine_of(model, servers, folder, **knobs):
    clients = [Server(s.url, KEY, timeout_s=20) for s in servers]
    return RemoteEngine(model, clients, FolderTransfer(folder), **{"max_context": 512, "slots": 4, **knobs})


def remote_request(prompt, seed=0, tokens=3):
    return Request(tuple(prompt), seed, Sampling(tokens, eos_ids=(4,)))


def test_answers_come_in_order_and_prompts_stay_with_their_server(model, start, tmp_path):
    servers = [start(delay=0.01), start(delay=0.01)]
    engine = engine_of(model, servers, tmp_path)
    engine.sync(0)
    requests = [remote_request([10 + p], seed=10 * p + s) for p in range(6) for s in range(4)]
    seen = []
    got = engine.generate(requests, lambda done, of: seen.append((done, of)))
    assert [c.token_ids.tolist() for c in got] == [[r.seed % 100, 3, 4] for r in requests]
    assert all(c.finish == "stop" and c.log_probs.tolist() == [-0.5] * 3 for c in got)
    assert seen == [(i, 24) for i in range(1, 25)]
    counts = [len(s.prompts) for s in servers]
    assert min(counts) > 0 and sum(counts) == 24  # how many each has depends on its speed
    shared = set(servers[0].prompts) & set(servers[1].prompts)
    assert len(shared) <= 2  # only what was left at the end is shared out
    assert {k: m.value for k, m in engine.metrics().items()} == {
        "rollout/servers": 2, "rollout/servers_lost": 0, "rollout/requests_resent": 0
    }  # fmt: skip


def test_a_push_reaches_every_server_whole_and_clears_its_cache(model, start, tmp_path):
    servers = [start(), start()]
    engine = engine_of(model, servers, tmp_path)
    engine.sync(5)
    expected = dict(tensors_of(model))
    for server in servers:
        assert server.version == 5 and server.weights.keys() == expected.keys()
        assert all(torch.equal(server.weights[n], expected[n]) for n in expected)
        assert server.calls.index("reset_prefix_cache") > server.calls.index("collective_rpc")
    assert engine.version == 5 and not list(tmp_path.rglob("weights-*"))
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    with pytest.raises(FloatingPointError, match="version 6 not pushed"):
        engine.sync(6)
    assert engine.version == 5 and all(server.version == 5 for server in servers)


def test_the_weights_below_adapters_are_pushed_once_and_then_adapters_alone(model, start, tmp_path):
    peft = pytest.importorskip("peft")
    plain = {name: tensor.clone() for name, tensor in tensors_of(model)}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    servers = [start(), start()]
    engine = engine_of(adapted, servers, tmp_path)
    engine.transfer = AdapterTransfer(tmp_path)
    now = servers[0].luffy_state()
    for state in (now, {key: now[key] for key in ("version", "max_context", "config")}):  # an older one's
        servers[0].luffy_state = lambda state=state: state
        with pytest.raises(UserError, match=r"was started without adapters; .* rollout.vllm.adapters=alone$"):
            engine.sync(0)
    del servers[0].luffy_state
    for server in servers:
        server.takes_adapters = True
    engine.sync(0)
    for server in servers:
        assert server.weights.keys() == plain.keys()
        assert all(torch.equal(server.weights[n], plain[n]) for n in plain)
        server.weights = None
    engine.sync(1)
    servers[1].version, servers[1].base, servers[1].adapters = -1, None, {}  # restarted
    engine.generate([remote_request([10 + p]) for p in range(8)])
    assert servers[0].weights is None and servers[1].weights.keys() == plain.keys()
    for server in servers:
        ((name, tensors),) = server.adapters.items()  # the one before is gone
        assert server.version == 1 and "000001" in name and set(server.asked_for) == {name}
        assert tensors.keys() == adapter_tensors(adapted).keys()
        assert len(server.calls) - server.calls[::-1].index("reset_prefix_cache") > server.calls.index(
            "v1/load_lora_adapter"
        )
    assert not list(tmp_path.rglob("weights-*"))


def test_a_lost_servers_requests_are_made_elsewhere_and_reported(model, start, tmp_path):
    servers = [start(delay=0.01), start(delay=0.01)]
    servers[1].die_after = 3
    said = []
    engine = engine_of(model, servers, tmp_path, warn=said.append)
    engine.sync(0)
    requests = [remote_request([10 + p], seed=10 * p + s) for p in range(6) for s in range(4)]
    got = engine.generate(requests)
    assert [c.token_ids[0].item() for c in got] == [r.seed % 100 for r in requests]
    values = {k: m.value for k, m in engine.metrics().items()}
    assert values["rollout/servers_lost"] == 1 and values["rollout/servers"] == 1
    assert values["rollout/requests_resent"] >= 1
    assert len(said) == 1 and servers[1].url in said[0] and "lost" in said[0]
    servers[1].dead, servers[1].die_after, servers[1].version = False, None, -1  # started again, with its first weights
    engine.generate(requests)
    assert servers[1].version == 0 and {k: m.value for k, m in engine.metrics().items()}["rollout/servers"] == 2
    assert any("is back" in line for line in said)


def test_a_restarted_server_gets_the_weights_before_it_is_asked(model, start, tmp_path):
    server = start()
    said = []
    engine = engine_of(model, [server], tmp_path, warn=said.append)
    engine.sync(3)
    server.version, server.weights = -1, {}
    engine.generate([remote_request([10])])
    assert server.version == 3 and server.weights and "other weights" in said[0]


def test_without_any_server_left_the_run_stops_and_says_so(model, start, tmp_path):
    server = start()
    engine = engine_of(model, [server], tmp_path)
    engine.sync(0)
    server.die_after = 1
    with pytest.raises(TrainingStopped, match="no vLLM server could answer"):
        engine.generate([remote_request([10], seed=s) for s in range(6)])
    with pytest.raises(TrainingStopped, match="no vLLM server is left"):
        engine.generate([remote_request([10])])


def test_a_hiccup_is_tried_again_and_a_lasting_fault_is_an_error(model, start, tmp_path):
    server = start()
    engine = engine_of(model, [server], tmp_path)
    engine.sync(0)
    server.broken = 2
    assert len(engine.generate([remote_request([10], seed=s) for s in range(4)])) == 4
    server.broken = 100
    with pytest.raises(TrainingStopped, match="hiccup"):
        engine.generate([remote_request([10])])


def test_a_server_that_lets_the_time_of_a_response_pass_is_lost_though_it_is_well(model, start, tmp_path):
    quick, stuck = start(), start()
    said = []
    clients = [Server(s.url, KEY, timeout_s=1.0) for s in (quick, stuck)]
    engine = RemoteEngine(model, clients, FolderTransfer(tmp_path), max_context=512, slots=2, warn=said.append)
    engine.sync(0)
    stuck.delay = 3.0
    requests = [remote_request([10 + p], seed=10 * p + s) for p in range(4) for s in range(2)]
    got = engine.generate(requests)
    assert [c.token_ids[0].item() for c in got] == [r.seed % 100 for r in requests]
    assert len(stuck.prompts) <= 2  # what was open there; nothing was sent a second time
    assert {k: m.value for k, m in engine.metrics().items()}["rollout/servers_lost"] == 1
    assert len(said) == 1 and "no answer in 1 s" in said[0]
    stuck.delay = 0.0
    engine.generate(requests)
    assert engine.metrics()["rollout/servers"].value == 2


def test_when_the_only_server_is_too_slow_the_run_stops_and_names_the_knob(model, start, tmp_path):
    server = start(delay=3.0)
    engine = RemoteEngine(model, [Server(server.url, KEY, 1.0)], FolderTransfer(tmp_path), max_context=512)
    engine.sync(0)
    with pytest.raises(TrainingStopped, match=r"no answer in 1 s; raise rollout\.vllm\.timeout_s"):
        engine.generate([remote_request([10])])
    assert len(server.prompts) == 1


def test_a_server_that_takes_too_long_for_a_push_is_lost(model, start, tmp_path):
    quick, stuck = start(), start()
    said = []
    clients = [Server(s.url, KEY, timeout_s=1.0) for s in (quick, stuck)]
    engine = RemoteEngine(model, clients, FolderTransfer(tmp_path), max_context=512, warn=said.append)
    load = stuck.luffy_load
    stuck.luffy_load = lambda version, folder: time.sleep(3.0) or {"version": -1}
    engine.sync(3)
    assert quick.version == 3 and len(said) == 1 and stuck.url in said[0]
    stuck.luffy_load = load
    engine.generate([remote_request([10])])
    assert stuck.version == 3 and engine.metrics()["rollout/servers"].value == 2


def test_a_server_that_answers_nothing_any_more_is_waited_for_once(model, start, tmp_path, monkeypatch):
    monkeypatch.setattr("luffy.rollout.vllm.http_client.HEALTH_TIMEOUT_S", 0.1)
    quick, stuck = start(), start()
    clients = [Server(s.url, KEY, timeout_s=1.5) for s in (quick, stuck)]
    engine = RemoteEngine(model, clients, FolderTransfer(tmp_path), max_context=512)
    engine.sync(0)
    plain = stuck.reply
    stuck.reply = lambda path, body: time.sleep(3.0) or plain(path, body)
    engine.generate([remote_request([10])])
    waited_for = len(stuck.calls)
    engine.sync(1)
    engine.generate([remote_request([10])])
    assert set(stuck.calls[waited_for:]) <= {"health"}
    stuck.reply = plain
    engine.sync(2)
    assert stuck.version == 2 and engine.metrics()["rollout/servers"].value == 2


def test_a_server_with_another_model_or_too_little_context_is_refused(model, start, tmp_path):
    other = start()
    other.config["hidden_size"] = 96
    with pytest.raises(UserError, match="serves another model: its hidden_size is 96, the policy's is 64"):
        engine_of(model, [other], tmp_path)
    with pytest.raises(UserError, match="takes 256 tokens, but 512 are needed"):
        engine_of(model, [start(max_context=256)], tmp_path)


@pytest.mark.parametrize(
    ("name", "architecture", "served", "policy"),
    [
        ("rope_theta", "qwen2", *({"rope_parameters": {"rope_type": "default", "rope_theta": t}} for t in (4e4, 1e4))),
        ("rms_norm_eps", "qwen2", {"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}),
        ("hidden_act", "llama", {"hidden_act": "gelu"}, {}),
        ("head_dim", "qwen3", {"head_dim": 32}, {}),
        ("sliding_window", "mistral", {"sliding_window": None}, {}),
    ],
)
def test_a_server_whose_model_computes_something_else_is_refused(name, architecture, served, policy, start, tmp_path):
    server = start()
    server.config = model_fields(make_model(architecture, **served).config)
    with pytest.raises(UserError, match=f"serves another model: its {name} is"):
        engine_of(make_model(architecture, **policy), [server], tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_same_model_in_other_words_is_taken(architecture, start, tmp_path):
    server, model = start(), make_model(architecture)
    config = model.config.to_dict()
    older = {**config, **config.pop("rope_parameters"), "head_dim": None}
    del older["rope_parameters"]
    older["rms_norm_eps"] = float(torch.tensor(older["rms_norm_eps"]))  # as in a GGUF file
    if older.get("sliding_window", 0) is None:
        older["sliding_window"] = 512  # but not used
    server.config = model_fields(SimpleNamespace(**older))
    engine_of(model, [server], tmp_path)


def worker_of(config, **arguments):
    worker = LuffyWorker()
    worker.model_config = SimpleNamespace(hf_config=config, max_model_len=8, **arguments)
    return worker


def test_a_window_that_vllm_was_told_to_leave_out_is_no_other_model():
    config = make_model("mistral").config
    assert worker_of(config, disable_sliding_window=False).luffy_state()["config"]["sliding_window"] == 8
    config.sliding_window = None  # so vLLM does
    assert "sliding_window" not in worker_of(config, disable_sliding_window=True).luffy_state()["config"]


def test_the_key_is_asked_for_and_never_shown(model, start, monkeypatch, tmp_path):
    server = start()
    wrong = Server(server.url, "not-the-key-of-it")
    with pytest.raises(UserError, match="HTTP 401.*api_key_env") as caught:
        wrong.model_entry()
    assert "not-the-key-of-it" not in str(caught.value) and "***" in str(caught.value)
    assert "not-the-key-of-it" not in repr(wrong)
    monkeypatch.setenv("SOME_KEY", "  ")
    with pytest.raises(UserError, match="SOME_KEY.*is empty"):
        key_from("SOME_KEY")
    monkeypatch.setenv("SOME_KEY", KEY)
    assert key_from("SOME_KEY") == KEY


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://host:1/v1"])
def test_an_address_is_checked(url):
    with pytest.raises(UserError, match="is not an address"):
        Server(url, KEY)
    with pytest.raises(UserError, match="a key does not belong"):
        Server("http://me:secret@host:1", KEY)


def test_a_server_that_is_not_there(model, tmp_path, start):
    server = start()
    server.dead = True
    with pytest.raises(UserError, match="does not answer"):
        engine_of(model, [server], tmp_path)


# ---- NCCL, with a group that only notes


def test_nccl_without_vllm_is_refused_before_any_server_is_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match="transfer=nccl needs vLLM installed with the trainer too"):
        NcclTransfer("127.0.0.1")


class Group:
    def __init__(self):
        self.sent = []

    def broadcast(self, tensor, src):
        assert src == 0 and tensor.is_contiguous()
        self.sent.append(tensor.clone())


def test_nccl_follows_the_protocol_and_makes_a_new_group_when_servers_change(model, start):
    servers = [start(world_size=2), start(world_size=3)]
    clients = [Server(s.url, KEY, timeout_s=20) for s in servers]
    infos, groups = [], []
    for server in servers:
        plain = server.reply
        server.reply = lambda path, body, plain=plain: infos.append((path, body)) or plain(path, body)

    def join(host, port, world):
        groups.append((Group(), host, world))
        return groups[-1][0]

    transfer = NcclTransfer("127.0.0.1", join)
    assert transfer.push(model, 4, clients) == []
    assert [(host, world) for _, host, world in groups] == [("127.0.0.1", 6)]
    offsets = sorted(b["init_info"]["rank_offset"] for p, b in infos if p == "init_weight_transfer_engine")
    assert offsets == [1, 3]
    expected = list(tensors_of(model))
    (update, _) = [b["update_info"] for p, b in infos if p == "update_weights"]
    assert update["names"] == [n for n, _ in expected] and update["dtype_names"] == ["float32"] * len(expected)
    assert update["shapes"] == [list(t.shape) for _, t in expected]
    assert all(torch.equal(a, b) for a, (_, b) in zip(groups[0][0].sent, expected, strict=True))
    order = [c for c in servers[0].calls if c in ("start_weight_update", "update_weights", "finish_weight_update")]
    assert order == ["start_weight_update", "update_weights", "finish_weight_update"]
    assert [s.version for s in servers] == [4, 4]
    transfer.push(model, 5, clients)
    assert len(groups) == 1
    servers[1].dead = True
    assert transfer.push(model, 6, clients) == [clients[1]]
    assert transfer.push(model, 7, clients[:1]) == [] and [world for *_, world in groups] == [6, 3, 3]
    assert servers[0].version == 7
    servers[0].dead = True
    assert transfer.push(model, 8, clients) == clients  # in whatever order they come back, they know of no group
    servers[0].dead = False
    assert transfer.push(model, 9, clients[:1]) == [] and len(groups) == 4


def test_nccl_merges_adapters_one_layer_at_a_time(model, start, monkeypatch):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    merged, alive, merge = [], [], Weight.tensor

    def noted(self):
        tensor = merge(self)
        if self.layer is not None:
            merged.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Weight, "tensor", noted)
    expected = {name: tensor.clone() for name, tensor in tensors_of(adapted)}
    merged.clear()

    class Counting(Group):
        def broadcast(self, tensor, src):
            super().broadcast(tensor, src)
            alive.append(sum(ref() is not None for ref in merged))

    group, server = Counting(), start()
    assert NcclTransfer("127.0.0.1", lambda *_: group).push(adapted, 1, [Server(server.url, KEY)]) == []
    assert len(merged) == 2 * model.config.num_hidden_layers and max(alive) == 1
    assert all(torch.equal(a, b) for a, b in zip(group.sent, expected.values(), strict=True))


@pytest.mark.parametrize("route", ["get_world_size", "init_weight_transfer_engine", "start_weight_update"])
def test_a_server_lost_while_the_nccl_group_is_made_is_reported_as_lost(model, start, route):
    """Whatever the call in which it goes silent; the others get their weights in a group of their own."""
    well, stuck = start(), start()
    plain = stuck.reply
    stuck.reply = lambda path, body: time.sleep(3.0 if path == route else 0) or plain(path, body)
    clients = [Server(s.url, KEY, timeout_s=1.0) for s in (well, stuck)]
    worlds = []
    transfer = NcclTransfer("127.0.0.1", lambda host, port, world: worlds.append(world) or Group())
    assert transfer.push(model, 1, clients) == [clients[1]]
    assert well.version == 1 and worlds[-1] == 2


def test_nobody_answers_with_old_weights_beside_a_server_that_is_lost_in_every_push(model, start):
    """It is well and answers questions, so it is asked to join again before the next batch, and is lost again."""
    well, stuck = start(), start()
    plain, versions = stuck.reply, []
    complete = well.complete
    well.complete = lambda body: versions.append(well.version) or complete(body)
    clients = [Server(s.url, KEY, timeout_s=0.5) for s in (well, stuck)]
    engine = RemoteEngine(model, clients, NcclTransfer("127.0.0.1", lambda *_: Group()), max_context=512)
    engine.sync(4)
    stuck.reply = lambda path, body: time.sleep(2.0 if path == "start_weight_update" else 0) or plain(path, body)
    engine.sync(5)
    engine.generate([remote_request([10])])
    assert versions == [5]
