"""Token overrides in the trainer: bit for bit nothing when absent, its metrics and errors when there."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from builders import make_model
from fake_servers import KEY, FakeGenerator
from trainings import final_weights, train_untimed
from transformers import AutoModelForCausalLM, AutoTokenizer

from luffy.config import load_config
from luffy.dry_run import dry_run
from luffy.dry_run import memory as memory_model
from luffy.errors import ConfigError, TrainingStopped, UserError
from luffy.rollout import Engine, NativeEngine
from luffy.rollout.overrides.aligned import AlignedEngine
from luffy.run_folder.recorder import read_json_lines
from luffy.train.loop import Trainer
from luffy.types import Request, Sampling


@pytest.fixture(scope="module")
def stronger(tiny_model, tmp_path_factory):
    """Another random model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("second")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def test_absent_or_switched_off_equals_the_plain_run_bit_for_bit(make_config, stronger):
    disabled = {"offpolicy_guidance": {"model_path": str(stronger), "enable": False}}
    plain = make_config(name="plain", train={"steps": 2})
    off = make_config(name="off", train={"steps": 2}, rollout=disabled)
    rows, off_rows = train_untimed(plain), train_untimed(off)
    weights, off_weights = final_weights(plain), final_weights(off)
    assert rows == off_rows and not [k for k in rows[0] if k.startswith("guidance/")]
    assert all(torch.equal(weights[n], off_weights[n]) for n in weights)


@pytest.mark.parametrize("rule", ["speculative", "threshold", "mixture", "aligned"])
def test_every_rule_trains_beside_trace_prefixes(make_config, stronger, rule):
    overrides = {"model_path": str(stronger), "rule": rule, "tau": 0.3, "eps": 0.5}
    cfg = make_config(
        rollout={"offpolicy_guidance": overrides},
        guidance={"n_prefix": 1, "strategy": "fixed", "min_ratio": 0.5, "max_ratio": 0.5},
        algorithm={"reject_extreme": False},
        train={"steps": 2},
        record={"samples": 6, "samples_every": 1},
    )
    rows = train_untimed(cfg)
    samples = read_json_lines(cfg.folder / "samples.jsonl")
    for r in rows:
        made = [s for s in samples if s["step"] == r["step"]]
        tokens = sum(s["length"] - s["off_policy_tokens"] for s in made)
        assert r["guidance/token_ratio"] == pytest.approx(sum(s["override_tokens"] for s in made) / tokens)
        assert 0 < r["guidance/token_ratio"] < 1 and 0 < r["guidance/sequence_ratio"] <= 1
        assert r["guidance/weight_max"] <= 10.0 and 0 < r["guidance/ess"] <= 1
        assert r.get("guidance/missing_log_prob_ratio", 0.0) == 0.0
    assert any(any(s["overrides"]) for s in samples) and any(any(s["off_policy"]) for s in samples)
    assert not any(o and t for s in samples for o, t in zip(s["overrides"], s["off_policy"], strict=True))


def test_mixture_without_overrides_has_weight_one(make_config, stronger):
    overrides = {"model_path": str(stronger), "rule": "mixture", "eps": 0.0}
    cfg = make_config(name="eps0", rollout={"offpolicy_guidance": overrides}, train={"steps": 2})
    rows, weights = train_untimed(cfg), final_weights(cfg)
    assert all(r["guidance/token_ratio"] == 0.0 for r in rows)
    assert all(r["guidance/weight_mean"] == pytest.approx(1.0, abs=1e-5) for r in rows)
    cfg = make_config(name="plain", train={"steps": 2})
    plain_rows, plain = train_untimed(cfg), final_weights(cfg)
    assert [r["critic/score/mean"] for r in rows] == [r["critic/score/mean"] for r in plain_rows]
    assert all(torch.allclose(weights[n], plain[n], atol=1e-5) for n in plain)


def test_the_eps_schedule_fades_out(make_config, stronger):
    overrides = {"model_path": str(stronger), "rule": "mixture", "eps": 1.0, "eps_end": 0.0, "eps_steps": 3}
    rows = train_untimed(make_config(rollout={"offpolicy_guidance": overrides}))
    ratios = [r["guidance/token_ratio"] for r in rows]
    assert ratios[0] == 1.0 and ratios == sorted(ratios, reverse=True) and ratios[3] == 0.0


def test_the_tau_schedule_fades_out(make_config, stronger):
    overrides = {"model_path": str(stronger), "rule": "threshold", "tau": 1.0, "tau_end": 0.0, "tau_steps": 3}
    rows = train_untimed(make_config(rollout={"offpolicy_guidance": overrides}))
    ratios = [r["guidance/token_ratio"] for r in rows]
    assert ratios[0] == 1.0 and ratios == sorted(ratios, reverse=True) and ratios[3] == 0.0


def test_sequence_weights_train(make_config, stronger):
    overrides = {"model_path": str(stronger), "rule": "mixture", "eps": 0.3}
    common = {"rollout": {"offpolicy_guidance": overrides}, "train": {"steps": 1}}
    whole = {"importance_level": "sequence", "reject_extreme": False}
    rows = train_untimed(make_config(name="whole", algorithm=whole, **common))
    token = train_untimed(make_config(name="token", algorithm={"reject_extreme": False}, **common))
    assert token[0]["guidance/weight_max"] <= 1 / 0.7 + 1e-4 < rows[0]["guidance/weight_max"]  # (1/(1-eps))^T at most
    assert rows[0]["guidance/ess"] < token[0]["guidance/ess"]


def resized(folder, target, rows):
    """The same model and tokenizer with more rows of padding, which are likely tokens here: worse than in earnest."""
    shutil.copytree(folder, target)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[-4:].normal_(std=0.3)
    model.save_pretrained(target)
    return str(target)


@pytest.mark.parametrize(
    ("padded", "rule"),
    [
        *(("both", rule) for rule in ("speculative", "threshold", "mixture", "aligned")),
        *(("policy", rule) for rule in ("speculative", "mixture")),
        *(("second", rule) for rule in ("threshold", "mixture")),
    ],
)
def test_padding_of_either_model_leaves_the_probabilities_exact(
    make_config, tiny_model, stronger, tmp_path, padded, rule
):
    policy = str(tiny_model) if padded == "second" else resized(tiny_model, tmp_path / "policy", 24)
    second = str(stronger) if padded == "policy" else resized(stronger, tmp_path / "second", 29)
    cfg = make_config(
        model={"path": policy, "device": "cpu"},
        rollout={"offpolicy_guidance": {"model_path": second, "rule": rule, "tau": 0.2, "eps": 0.5}},
        algorithm={"reject_extreme": False},
        train={"steps": 1},
    )
    rows = train_untimed(cfg)
    assert all(0 < r["guidance/token_ratio"] < 1 for r in rows)
    samples = read_json_lines(cfg.folder / "samples.jsonl")
    written = [(t, o) for s in samples for t, o in zip(s["token_ids"], s["overrides"], strict=True)]
    assert max(t for t, o in written if o) < 18  # the tokenizer's: the second model never writes padding
    if rule != "aligned":
        # What the engine took for the policy's own probabilities is what the trainer computes.
        assert all(r["rollout/logprob_diff_max"] < 1e-4 for r in rows)
    if rule == "mixture":
        assert (max(t for t, _ in written) >= 18) is (padded != "second")
        assert all(r["guidance/weight_max"] <= 2.0 + 1e-4 for r in rows)


class Foreign(Engine):
    """Another engine: it gives tokens and their log-probs, nothing else."""

    def __init__(self, cfg, model, device, warn):
        self._engine = NativeEngine(model, max_slots=cfg.rollout.slots)
        self.generate, self.sync = self._engine.generate, self._engine.sync


class Silent(Foreign):
    def __init__(self, *given):
        super().__init__(*given)
        self.generate = lambda requests: [
            replace(c, log_probs=torch.full_like(c.log_probs, torch.nan)) for c in self._engine.generate(requests)
        ]


FOREIGN = f"{__name__}:Foreign"


def test_another_engine_and_the_second_model_take_turns(make_config, stronger):
    overrides = {
        "model_path": str(stronger),
        "rule": "mixture",
        "eps": 0.6,
        "eps_end": 0.0,
        "eps_steps": 3,
        "max_overrides": 4,
    }
    cfg = make_config(
        rollout={"engine": FOREIGN, "offpolicy_guidance": overrides},
        guidance={"n_prefix": 1, "strategy": "fixed", "min_ratio": 0.5, "max_ratio": 0.5},
        algorithm={"reject_extreme": False},
    )
    rows = train_untimed(cfg)
    ratios = [r["guidance/token_ratio"] for r in rows]
    assert ratios[0] > ratios[1] > ratios[3] == 0.0 and all(
        r.get("guidance/missing_log_prob_ratio", 0.0) == 0.0 for r in rows
    )
    assert all(r["rollout/logprob_diff_max"] < 1e-4 for r in rows)  # where the policy wrote; elsewhere unknown
    assert rows[0]["guidance/ess"] < 1 and rows[3]["guidance/weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert max(sum(s["overrides"]) for s in read_json_lines(cfg.folder / "samples.jsonl")) == 4


def test_another_engine_aligns(make_config, stronger):
    overrides = {"model_path": str(stronger), "rule": "aligned"}
    rows = train_untimed(make_config(rollout={"engine": FOREIGN, "offpolicy_guidance": overrides}, train={"steps": 1}))
    assert rows[0]["guidance/token_ratio"] > 0


@pytest.mark.parametrize("rule", ["speculative", "threshold"])
def test_a_rule_another_engine_cannot_honour_is_refused_before_the_first_step(make_config, stronger, rule):
    overrides = {"model_path": str(stronger), "rule": rule}
    cfg = make_config(rollout={"engine": FOREIGN, "offpolicy_guidance": overrides})
    with pytest.raises(UserError, match=f"rule {rule} cannot be honoured with the engine Foreign.*native engine"):
        Trainer(cfg)
    assert not cfg.folder.exists()


def test_an_engine_without_log_probs_is_refused_before_the_first_step(make_config, stronger):
    overrides = {"model_path": str(stronger), "rule": "mixture"}
    with pytest.raises(UserError, match="Silent gave 1 tokens with 0 log-probs"):
        Trainer(make_config(rollout={"engine": f"{__name__}:Silent", "offpolicy_guidance": overrides}))


def test_several_optimizer_steps_and_the_literal_objective(make_config, stronger):
    overrides = {"model_path": str(stronger), "rule": "mixture", "eps": 0.5, "max_overrides": 2}
    common = {"rollout": {"offpolicy_guidance": overrides}, "batch": {"mini_batch": 2}, "train": {"steps": 1}}
    decoupled = train_untimed(make_config(name="decoupled", **common))
    literal = train_untimed(make_config(name="literal", algorithm={"importance_objective": "literal"}, **common))
    assert decoupled[0]["actor/pg_loss"] != literal[0]["actor/pg_loss"]
    samples = read_json_lines(make_config(name="decoupled").folder / "samples.jsonl")
    assert max(sum(s["overrides"]) for s in samples) == 2


def test_resume_is_exact_under_overrides(make_config, stronger):
    overrides = {"model_path": str(stronger), "rule": "mixture", "eps": 0.8, "eps_end": 0.2}
    whole = train_untimed(make_config(name="whole", rollout={"offpolicy_guidance": overrides}))
    overrides = {**overrides, "eps_steps": 4}
    train_untimed(make_config(name="halves", rollout={"offpolicy_guidance": overrides}, train={"steps": 2}))
    halves = train_untimed(make_config(name="halves", rollout={"offpolicy_guidance": overrides}))
    assert halves == whole


def test_another_tokenizer_is_refused_before_the_first_step(make_config, stronger, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(stronger, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match="tokenizer|vocab"):
        Trainer(make_config(rollout={"offpolicy_guidance": {"model_path": str(other)}}))


@pytest.mark.parametrize("rule", ["mixture", "aligned"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_position_embeddings": 20}, "takes 20 tokens, but data.max_prompt_tokens . rollout.max_tokens = 32"),
        ({"vocab_size": 17}, "has 17 tokens, fewer than the tokenizer's 18"),
    ],
)
def test_a_second_model_that_does_not_fit_is_refused(make_config, stronger, tmp_path, change, message, rule):
    other = tmp_path / "other"
    shutil.copytree(stronger, other)
    model = AutoModelForCausalLM.from_pretrained(stronger)
    model.resize_token_embeddings(change.get("vocab_size", 18))
    model.config.update(change)
    model.save_pretrained(other)
    cfg = make_config(rollout={"offpolicy_guidance": {"model_path": str(other), "rule": rule}})
    with pytest.raises(UserError, match=message):
        Trainer(cfg)
    with pytest.raises(UserError, match=message):
        dry_run(cfg, "rl")


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), ("bfloat16", 2)])
def test_a_dry_run_counts_the_second_model_and_its_cache(make_config, stronger, monkeypatch, dtype, size):
    monkeypatch.setattr(memory_model, "GIB", 1)  # bytes
    monkeypatch.setattr(memory_model, "resident_bytes", lambda: 0)  # of this process: it grows from call to call

    def memory(**rollout):
        (line,) = [
            line for line in dry_run(make_config(rollout={"slots": 16, **rollout}), "rl") if line.startswith("memory")
        ]
        found = re.fullmatch(
            r"memory     about (\S+) GiB at the peak, in the update: (.*) GiB; rollout (\S+) GiB; .*", line
        )
        values = [part.rsplit(" ", 1) for part in found[2].split(", ")]
        return float(found[1]), {name: float(value) for name, value in values}, float(found[3])

    update_alone, _, rollout_alone = memory()
    update, parts, rollout = memory(offpolicy_guidance={"model_path": str(stronger), "dtype": dtype})
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(stronger).parameters()) * size
    cache = 2 * 2 * 2 * 8 * (3 + 16) * 16 * size  # keys and values, layers, heads, width, tokens of a sequence, slots
    assert parts["second model"] == weights
    assert update == update_alone + weights  # no cache is there during the update
    assert rollout == rollout_alone + weights + cache


SERVED = "rollout.offpolicy_guidance.servers=[http://a:1]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.offpolicy_guidance.rule=mixture"], "model_path' is empty"),
        (["rollout.offpolicy_guidance.model_path=x", "rollout.top_p=0.9"], "rollout.top_p=1"),
        (
            ["rollout.offpolicy_guidance.model_path=x", "rollout.offpolicy_guidance.tensor_parallel_size=2"],
            r"one device; set it to 1, or serve the model \(luffy serve .*tensor_parallel_size=2\)",
        ),
        (
            [SERVED, "rollout.offpolicy_guidance.rule=threshold"],
            "needs the second model's whole.*mixture or speculative",
        ),
        ([SERVED, "rollout.offpolicy_guidance.model_path=x"], "'rollout.offpolicy_guidance.model_path' is x, and"),
        (
            [SERVED, "rollout.offpolicy_guidance.tensor_parallel_size=2"],
            "start the server with rollout.vllm.tensor_par",
        ),
        ([SERVED, "rollout.offpolicy_guidance.dtype=bfloat16"], "start the server with .* model.dtype"),
        ([SERVED, "rollout.engine=vllm"], "whole distribution.* or rollout.engine=native"),
        (
            [SERVED, "rollout.offpolicy_guidance.rule=mixture", "rollout.vllm.servers=[http://a:1/]"],
            "http://a:1 is in 'rollout.vllm.servers'.*start another server",
        ),
        (["rollout.offpolicy_guidance.rule=mixtur"], "did you mean 'mixture'"),
        (["algorithm.importance_clamp_min=3", "algorithm.importance_clamp_max=2"], "exceeds"),
    ],
)
def test_bad_settings(overrides, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(None, overrides)
    assert "\n" not in str(error.value)


def test_aligned_takes_the_second_model_at_its_own_temperature():
    """Its text and log-probs are those that the second model alone draws at that temperature."""
    policy, second = (NativeEngine(make_model("llama", seed=seed)) for seed in (1, 2))
    requests = [Request((5, 6, 7), seed, Sampling(8, temperature=1.0)) for seed in range(3)]
    cool = [replace(r, sampling=replace(r.sampling, temperature=0.2)) for r in requests]
    made = AlignedEngine(policy, second, 0.2).generate(requests)
    for got, alone, hot in zip(made, second.generate(cool), second.generate(requests), strict=True):
        assert torch.equal(got.token_ids, alone.token_ids) and torch.equal(got.guidance_log_probs, alone.log_probs)
        assert not torch.equal(alone.log_probs, hot.log_probs)


def test_aligned_refuses_what_it_cannot_honour(make_config, stronger):
    overrides = {"model_path": str(stronger), "rule": "aligned", "max_overrides": 2}
    with pytest.raises(UserError, match="aligned"):
        Trainer(make_config(rollout={"offpolicy_guidance": overrides}))


# ---- the second model on a server


@pytest.fixture
def server(stronger, monkeypatch):
    monkeypatch.setenv("LUFFY_VLLM_KEY", KEY)
    model = AutoModelForCausalLM.from_pretrained(stronger)
    made = FakeGenerator(model, AutoTokenizer.from_pretrained(stronger), max_context=128)
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.mark.parametrize(("rule", "engine"), [("mixture", FOREIGN), ("aligned", "native")])
def test_a_run_with_a_server_is_the_run_with_its_model(make_config, stronger, server, rule, engine):
    """Mixture: of the run in which policy and second model take turns in one process."""
    common = {"rule": rule, "eps": 0.5, "temperature": 0.8}
    both = {"guidance": {"n_prefix": 1}, "algorithm": {"reject_extreme": False}, "train": {"steps": 2}}
    local = {"engine": engine, "offpolicy_guidance": common | {"model_path": str(stronger)}}
    remote = {"offpolicy_guidance": common | {"servers": [server.url]}}
    runs = [make_config(name=name, rollout=r, **both) for name, r in (("local", local), ("served", remote))]
    ours, theirs = map(train_untimed, runs)
    weights, served_weights = map(final_weights, runs)
    assert len(server.asked) > 10
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("critic/score/mean", "guidance/token_ratio", "guidance/ess", "actor/loss", "actor/grad_norm"):
            assert mine[name] == pytest.approx(other[name], abs=1e-4), name
    kept = [[s["token_ids"] for s in read_json_lines(cfg.folder / "samples.jsonl")] for cfg in runs]
    assert kept[0] == kept[1]
    assert all(torch.allclose(weights[n], served_weights[n], atol=1e-5) for n in weights)


def test_speculative_overrides_from_a_server_train(make_config, server):
    overrides = {"servers": [server.url], "rule": "speculative", "max_overrides": 3}
    cfg = make_config(
        rollout={"offpolicy_guidance": overrides, "temperature": 0.9},
        guidance={"n_prefix": 1, "strategy": "fixed", "min_ratio": 0.5, "max_ratio": 0.5},
        algorithm={"reject_extreme": False},
        train={"steps": 2},
        record={"samples": 6, "samples_every": 1},
    )
    rows = train_untimed(cfg)
    samples = read_json_lines(cfg.folder / "samples.jsonl")
    assert max(sum(s["overrides"]) for s in samples) == 3
    for row in rows:
        assert row["rollout/logprob_diff_max"] < 1e-4  # the policy's own log-probs are those the trainer computes
        assert 0 < row["guidance/token_ratio"] < 1 and 0 < row["guidance/ess"] < 1
        assert row.get("guidance/missing_log_prob_ratio", 0.0) == 0.0


def test_a_server_that_is_lost_in_a_run_ends_it_in_one_line(make_config, server):
    cfg = make_config(rollout={"offpolicy_guidance": {"servers": [server.url]}}, train={"steps": 2})
    with Trainer(cfg) as trainer, pytest.raises(TrainingStopped, match="no vLLM server of the second model") as error:
        server.dead = True
        trainer.train()
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="the second model's vLLM server does not answer") as error:
        Trainer(make_config(name="late", rollout={"offpolicy_guidance": {"servers": [server.url]}}))
    assert "\n" not in str(error.value)


def test_a_dry_run_counts_no_memory_for_a_served_model(make_config):
    def memory(**rollout):
        (line,) = [line for line in dry_run(make_config(rollout=rollout), "rl") if line.startswith("memory")]
        return line.partition("; rollout")[0]

    assert "second model" not in memory(offpolicy_guidance={"servers": ["http://127.0.0.1:1"]})
