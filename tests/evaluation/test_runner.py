"""Evaluations of the quickstart's base model: whole, interrupted, compared, analysed, and from the shell."""

import csv
import datetime
import json
import re
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import yaml
from builders import write_rows
from commands import luffy

import luffy.evaluation.plan as plan
import luffy.evaluation.runner as runner
from luffy.config.knobs import RewardConfig
from luffy.data import prompts
from luffy.errors import UserError
from luffy.evaluation.accuracy import pass_at_k
from luffy.evaluation.background_work import BackgroundWork
from luffy.evaluation.compare import as_markdown, compare, marks
from luffy.evaluation.engines import LoadedModel, load_native, model_identity
from luffy.evaluation.plan import Options
from luffy.evaluation.results import as_markdown as result_markdown
from luffy.evaluation.results import model_label
from luffy.evaluation.runner import run_evaluation
from luffy.rewards.kinds import reward
from luffy.rollout.native import NativeEngine
from studies.quickstart.task import write_dataset

BASE = str(resources.files("luffy.quickstart") / "assets" / "base")


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Two-term sums: the base is right once in twenty."""
    return write_dataset(tmp_path_factory.mktemp("sums"), 0, train=8, heldout=24, ood=4, terms=2)["heldout"]


@pytest.fixture(scope="module")
def options(problems):
    return Options(
        model=BASE, suite=str(problems), k=8, temperature=1.0, max_tokens=24, style="plain", reward="gsm8k", chunk=40
    )


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """An undisturbed evaluation: its folder and result."""
    folder = tmp_path_factory.mktemp("whole") / "eval"
    return folder, run_evaluation(replace(options, out=folder))


def read_items(folder):
    rows = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["benchmark"], row["id"], row["sample"]))


def test_another_prompt_than_the_trainings_is_told(options, tmp_path, caplog):
    model = tmp_path / "run" / "checkpoints" / "step-000001" / "model"
    shutil.copytree(BASE, model)
    latest = model.parents[1] / "latest"
    latest.symlink_to("step-000001")
    options = replace(options, model=str(latest / "model"), k=1, limit=1)
    config = tmp_path / "run" / "config.yaml"
    config.write_text("data: {style: plain}\n")
    run_evaluation(replace(options, out=tmp_path / "same"))
    assert "trained with" not in caplog.text
    config.write_text("data: {style: chat, system_prompt: Think.}\n")
    run_evaluation(replace(options, out=tmp_path / "other"))
    assert "trained with --style 'chat', this evaluation has 'plain'" in caplog.text
    assert "trained with --system-prompt 'Think.', this evaluation has None" in caplog.text
    config.write_text("[another tool's]\n")
    run_evaluation(replace(options, out=tmp_path / "foreign"))


def test_the_figures_follow_from_the_items(whole, problems):
    folder, result = whole
    items = read_items(folder)
    golds = {row["id"]: row["answer"] for row in map(json.loads, problems.read_text().splitlines())}
    assert len(items) == 24 * 8 and {row["id"] for row in items} == set(golds)
    for row in items:
        assert row["score"] == float(row["response"].endswith(f"#### {golds[row['id']]}"))
        assert row["tokens"] == len(row["response"]) + (row["finish"] == "stop")  # one character, one token
    right = {item: sum(r["score"] for r in items if r["id"] == item) for item in golds}
    summary = result.benchmarks["heldout"]
    assert summary.accuracy == pytest.approx(sum(right.values()) / len(items))
    assert 0 < summary.accuracy < 0.3
    for k in (1, 2, 4, 8):
        assert summary.pass_at[k] == pytest.approx(sum(pass_at_k(8, int(c), k) for c in right.values()) / 24)
    saved = json.loads((folder / "result.json").read_text())
    assert saved["benchmarks"]["heldout"]["accuracy"] == summary.accuracy == saved["average"]["accuracy"]
    assert saved["settings"]["temperature"] == 1.0 and saved["missing"] == []
    assert f"| base | {100 * summary.accuracy:.1f} |" in (folder / "result.md").read_text()


def test_the_result_names_the_system_prompt(whole):
    def line(prompt):
        told = replace(whole[1], settings={**whole[1].settings, "system_prompt": prompt})
        return result_markdown(told).splitlines()[-1]

    assert line(None).startswith("Settings: temperature 1.0,") and "style plain, system_prompt None, reward" in line(
        None
    )
    assert 'style plain, system_prompt "Be brief,\\nplease.", reward gsm8k' in line("Be brief,\nplease.")


def test_an_evaluation_keeps_the_date_of_its_prompts(options, tmp_path, monkeypatch):
    model = tmp_path / "dated"
    shutil.copytree(BASE, model)
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d%m%Y') }}={{ messages[0]['content'] }}")
    asked = replace(options, model=str(model), style="chat", limit=2, k=1, max_tokens=4)
    day = lambda text: monkeypatch.setattr(prompts, "today", lambda: datetime.date.fromisoformat(text))  # noqa: E731
    day("2024-07-26")
    run_evaluation(replace(asked, out=tmp_path / "first"))
    day("2024-07-27")
    first = run_evaluation(replace(asked, out=tmp_path / "first"))  # goes on with its own date
    second = run_evaluation(replace(asked, out=tmp_path / "second"))
    again = run_evaluation(replace(asked, out=tmp_path / "again", date="2024-07-26"))
    assert [r.settings["date"] for r in (first, second, again)] == ["2024-07-26", "2024-07-27", "2024-07-26"]
    assert read_items(tmp_path / "first") == read_items(tmp_path / "again")
    assert ", date 2024-07-26;" in result_markdown(first)
    noted = compare([tmp_path / "first", tmp_path / "second"], resamples=10).notes
    assert [note for note in noted if note.startswith("date differs")]


def test_another_chat_template_is_used_and_kept(options, tmp_path):
    """A model that was trained with another prompt is evaluated with that one."""
    template = tmp_path / "conversation.jinja"
    template.write_text("1+{{ messages[-1].content }}")
    asked = replace(
        options, style="chat", chat_template=str(template), k=1, limit=1, max_tokens=2, out=tmp_path / "eval"
    )
    run_evaluation(asked)
    settings = json.loads((tmp_path / "eval" / "settings.json").read_text())
    assert settings["chat_template"] == template.read_text() and settings["style"] == "chat"
    with pytest.raises(UserError, match="chat_template"):
        run_evaluation(replace(asked, chat_template="{{ messages[-1].content }}"))


def test_a_prompt_that_opens_a_thought_leaves_no_answer_without_its_end(options, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    number = tokenizer["model"]["vocab"].pop("-")
    tokenizer["model"]["vocab"]["<think>"] = number
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][0], "id": number, "content": "<think>", "special": False}
    )
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    sums = tmp_path / "sums.jsonl"
    write_rows(sums, ({"prompt": f"{i}+2=?", "answer": str(i + 2)} for i in range(8)))
    given = {"model": str(model), "suite": str(sums), "chat_template": "{{ messages[-1].content }}<think>"}
    asked = replace(options, **given, style="chat", k=1, reward="numeric", out=tmp_path / "new")
    run_evaluation(asked)
    assert {row["status"] for row in read_items(tmp_path / "new")} == {"no_answer"}
    old = RewardConfig(kind="numeric", prompt_opens_thought=False)
    run_evaluation(replace(asked, reward_settings=old, out=tmp_path / "old"))
    assert "ok" in {row["status"] for row in read_items(tmp_path / "old")}
    settings = [json.loads((tmp_path / name / "settings.json").read_text()) for name in ("new", "old")]
    assert [one["prompt_opens_thought"] for one in settings] == [True, False]
    with pytest.raises(UserError, match="with prompt_opens_thought=false, this one has prompt_opens_thought=true"):
        run_evaluation(replace(asked, out=tmp_path / "old"))
    del settings[1]["prompt_opens_thought"]  # as luffy wrote it before it knew
    (tmp_path / "old" / "settings.json").write_text(json.dumps(settings[1]))
    with pytest.raises(UserError, match="with prompt_opens_thought=false, this one has"):
        run_evaluation(replace(asked, out=tmp_path / "old"))


def test_seeds_differ_between_items_and_samples(whole):
    items = read_items(whole[0])
    assert len({row["seed"] for row in items}) == len(items)


@pytest.fixture
def asked(monkeypatch):
    """Seeds of what the engine is asked for. It breaks off after ``asked.limit`` responses."""

    class Asked(list):
        limit = None

    seeds, stream = Asked(), NativeEngine.stream

    def counted(engine, requests):
        requests = list(requests)
        seeds.extend(request.seed for request in requests)
        for number, finished in enumerate(stream(engine, requests)):
            if number == seeds.limit:
                raise KeyboardInterrupt
            yield finished

    monkeypatch.setattr(NativeEngine, "stream", counted)
    return seeds


def test_a_killed_evaluation_goes_on_and_ends_the_same(whole, options, tmp_path, asked):
    """Killed when 80 of 100 responses were saved, in the middle of writing a line."""
    asked.limit = 100
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(replace(options, out=tmp_path))
    saved = {row["seed"] for row in read_items(tmp_path)}
    assert len(saved) == 80 and not (tmp_path / "result.json").exists()
    with (tmp_path / "items.jsonl").open("a") as file:
        file.write('{"benchmark": "heldout", "id": "1')
    asked.clear()
    asked.limit = None
    result = run_evaluation(replace(options, out=tmp_path, chunk=17))
    assert read_items(tmp_path) == read_items(whole[0])
    assert result.benchmarks == whole[1].benchmarks
    assert len(asked) == 24 * 8 - 80 and not set(asked) & saved


def test_a_finished_evaluation_makes_nothing_again(whole, options, asked):
    assert run_evaluation(replace(options, out=whole[0])) == whole[1]
    assert asked == []


def test_slots_do_not_wait_for_a_save(options, tmp_path, monkeypatch):
    """As many decoding steps as one call of the engine takes, however often is saved."""
    engines, load = [], runner.load_engine
    monkeypatch.setattr(runner, "load_engine", lambda *args, **kw: engines.append(load(*args, **kw)) or engines[-1])
    for chunk in (7, 1000):
        run_evaluation(replace(options, out=tmp_path / str(chunk), chunk=chunk, slots=16))
    often, once = (loaded.engine.stats for loaded in engines)
    assert often.decode_steps == once.decode_steps and often.prefilled_prompts == 24
    lines = [(tmp_path / name / "items.jsonl").read_text() for name in ("7", "1000")]
    assert lines[0] == lines[1]


def test_a_save_that_fails_ends_the_evaluation(options, tmp_path, monkeypatch):
    def full(self, rows):
        raise OSError("no space left on device")

    monkeypatch.setattr(runner.JsonLinesWriter, "write", full)
    with pytest.raises(OSError, match="no space left"):
        run_evaluation(replace(options, out=tmp_path))
    assert not (tmp_path / "result.json").exists()


def test_what_is_left_open_is_what_the_device_does_best(options, whole, tmp_path):
    def chosen(out=tmp_path, **changes):
        filled = plan.with_defaults(replace(options, **changes), out)
        return filled.dtype, filled.slots

    assert chosen() == ("float32", 64)
    assert chosen(device="cuda") == ("bfloat16", 1024)
    assert chosen(device="cuda", engine="vllm") == ("bfloat16", 256)
    assert chosen(device="cuda", dtype="float32", slots=5) == ("float32", 5)
    assert chosen(out=whole[0], device="cuda") == ("float32", 1024)  # as the evaluation there began


def test_work_in_the_background():
    done = []

    def work(number):
        if number == 1:
            raise ValueError("broken")
        done.append(number)

    with BackgroundWork() as background:
        background.submit(work, 0)
    with pytest.raises(ValueError, match="broken"), BackgroundWork() as background:
        background.submit(work, 1)
    with pytest.raises(ValueError, match="broken"), BackgroundWork() as background:
        for number in range(1, 5):
            background.submit(work, number)
    with pytest.raises(KeyboardInterrupt), BackgroundWork() as background:
        background.submit(work, 9)
        raise KeyboardInterrupt
    assert done in ([0, 2, 9], [0, 2, 3, 9])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.7}, "with temperature=1.0, this one has temperature=0.7"),
        ({"k": 4}, 'with k={"heldout": 8}, this one has k={"heldout": 4}'),
        ({"seed": 1}, "with seed=0, this one has seed=1"),
        ({"limit": 3}, "holds an evaluation with limit="),
    ],
)
def test_another_setting_is_refused(whole, options, change, message):
    with pytest.raises(UserError) as error:
        run_evaluation(replace(options, out=whole[0], **change))
    assert message in str(error.value) and "give another --out" in str(error.value)


def test_another_model_is_refused_and_a_moved_one_is_not(whole, options, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in Path(BASE).iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert model_identity(str(moved)) == model_identity(BASE)
    assert run_evaluation(replace(options, out=whole[0], model=str(moved))).benchmarks == whole[1].benchmarks
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match="holds an evaluation with model_identity="):
        run_evaluation(replace(options, out=whole[0], model=str(moved)))


def test_two_evaluations_cannot_share_a_folder(options, tmp_path):
    with runner.alone_in(tmp_path), pytest.raises(UserError, match="another evaluation is writing to"):
        run_evaluation(replace(options, out=tmp_path))


def test_too_long_for_the_context(options, tmp_path):
    with pytest.raises(UserError, match=r"--max-tokens 100000 and the shortest prompt of 6 tokens exceed .* at most"):
        run_evaluation(replace(options, out=tmp_path, max_tokens=100_000))
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1+" * 10_000, "answer": "1"}) + "\n")
    with pytest.raises(
        UserError, match=r"long\.jsonl:1: the prompt leaves no room in the model's context of \d+ tokens"
    ):
        run_evaluation(replace(options, out=tmp_path, suite=str(tmp_path / "long.jsonl")))


def test_a_long_prompt_costs_the_others_nothing(options, tmp_path, monkeypatch, caplog):
    suite = tmp_path / "unequal.jsonl"
    prompts = ["1+2", "1+" * 20 + "2", "1+" * 49 + "2"]  # of 3, 41 and 99 tokens
    write_rows(suite, ({"prompt": prompt, "answer": "3"} for prompt in prompts))
    options = replace(options, suite=str(suite), k=2, max_tokens=None, engine="test_runner:narrow_engine")
    asked, stream = [], NativeEngine.stream

    def noted(engine, requests):
        requests = list(requests)
        asked.append([request.sampling.max_tokens for request in requests])
        return stream(engine, requests)

    monkeypatch.setattr(NativeEngine, "stream", noted)

    def limit(out, **changes):
        caplog.clear()
        return run_evaluation(replace(options, out=tmp_path / out, **changes)).settings["max_tokens"]

    assert limit("default") == 125 and asked.pop() == [125] * 2 + [87] * 2 + [29] * 2 and not caplog.text
    assert limit("given", max_tokens=80) == 80 and asked.pop() == [80] * 4 + [29] * 2
    told = "prompts leave less than 80 tokens of the model's context: their responses may be cut off sooner"
    assert f"1 of 3 {told}" in caplog.text
    monkeypatch.setattr(runner, "PAPER_MAX_TOKENS", 80)
    assert limit("paper") == 80 and f"1 of 3 {told}" in caplog.text
    assert limit("default") == 125 and not caplog.text  # as it began
    settings = tmp_path / "given" / "settings.json"
    settings.write_text(settings.read_text().replace('"max_tokens": 80', '"max_tokens": "80"'))
    with pytest.raises(UserError, match='holds an evaluation with max_tokens="80", this one has max_tokens=80'):
        limit("given")
    assert limit("fits", max_tokens=29) == 29 and asked.pop() == [29] * 6 and not caplog.text
    with pytest.raises(UserError, match=r"126 and the shortest prompt of 3 tokens exceed .* of 128; give at most 125"):
        limit("more", max_tokens=126)


def narrow_engine(model, **settings):
    return replace(load_native(model, **settings), context=128)


def own_engine(model, *, dtype, device, slots):
    loaded = load_native(model, dtype=dtype, device=device, slots=slots)
    return LoadedModel(loaded.engine, loaded.tokenizer, loaded.eos_ids, 64)


def test_any_engine_by_its_import_path(options, whole, tmp_path):
    run_evaluation(replace(options, out=tmp_path, engine="test_runner:own_engine", limit=2))
    first = {row["id"] for row in read_items(tmp_path)}
    assert read_items(tmp_path) == [row for row in read_items(whole[0]) if row["id"] in first]
    with pytest.raises(UserError, match="--engine vlm is unknown: use native, vllm, or module:function"):
        run_evaluation(replace(options, out=tmp_path, engine="vlm"))


def test_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a quickstart may have left such a folder
    assert model_label("runs/tiny-luffy/checkpoints/step-000060/model") == "tiny-luffy-step-000060"
    assert model_label("runs/tiny-luffy/checkpoints/latest/model") == "tiny-luffy"
    assert model_label("runs/quickstart/sft/seed-0/checkpoints/latest/model") == "quickstart-sft-seed-0"
    assert model_label("/else/where/checkpoints/step-000001/model") == "else-where-step-000001"
    assert model_label("Qwen/Qwen2.5-Math-7B") == "Qwen2.5-Math-7B"
    assert model_label("checkpoints/model") == "model"


def test_what_a_recipe_calls_a_success_is_right(options, whole, tmp_path):
    """Half a point for a right answer: the same responses are right as with a whole one."""
    settings = RewardConfig(weights={"gsm8k": 0.5}, success=0.5)
    result = run_evaluation(replace(options, out=tmp_path / "half", reward=None, reward_settings=settings))
    assert result.benchmarks["heldout"].accuracy == whole[1].benchmarks["heldout"].accuracy > 0
    old = rewritten(whole[0], tmp_path / "old", lambda row: {k: v for k, v in row.items() if k != "right"})
    assert compare([tmp_path / "half", old]).accuracies["half"] == compare([whole[0], old]).accuracies["old"]


def test_a_reward_that_fails_on_every_response_gives_no_result(options, tmp_path):
    works = [False]

    @reward("works_at_times")
    def works_at_times(response, answer, problem):
        return works.pop() or 1 / 0

    options = replace(options, out=tmp_path / "eval", k=1, limit=4, chunk=2, reward="works_at_times")
    told = r"failed on all 2 responses, first: reward works_at_times: error on problem .*\(ZeroDivisionError: "
    with pytest.raises(UserError, match=told):
        run_evaluation(options)
    assert read_items(tmp_path / "eval") == [] and not (tmp_path / "eval" / "result.json").exists()
    works[:] = [False, False, False, True]  # of the second part all fail, and it counts
    assert run_evaluation(options).benchmarks["heldout"].statuses == {"ok": 1, "error": 3}


def test_one_problem_has_no_standard_error(options, tmp_path):
    result = run_evaluation(replace(options, out=tmp_path / "one", limit=1))
    assert result.benchmarks["heldout"].standard_error is None
    cells = next(line for line in result_markdown(result).splitlines() if line.startswith("| heldout")).split(" | ")
    assert cells[1] == "1" and cells[4] == ""


# ---- compare


def test_accuracies_that_differ_in_the_last_bit_are_equal():
    assert marks({"a": 0.1 + 0.2 + 0.3, "b": 0.3 + 0.2 + 0.1}) == {"a": "60.0", "b": "60.0"}
    assert marks({"a": 0.6, "b": 0.5, "c": 0.4}) == {"a": "**60.0**", "b": "<u>50.0</u>", "c": "40.0"}


@pytest.fixture(scope="module")
def greedy(options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("greedy") / "greedy"
    run_evaluation(replace(options, out=folder, temperature=0.0, k=1))
    return folder


def rewritten(folder, target, change):
    """A copy of an evaluation whose items went through ``change`` (None: left out)."""
    target.mkdir()
    rows = [changed for row in read_items(folder) if (changed := change(row)) is not None]
    write_rows(target / "items.jsonl", rows)
    (target / "result.json").write_text((folder / "result.json").read_text())
    return target


def test_compare_marks_the_best_and_tests_every_pair(whole, greedy, tmp_path):
    perfect = rewritten(whole[0], tmp_path / "perfect", lambda row: {**row, "score": 1.0, "right": True})
    comparison = compare([greedy, whole[0], perfect])
    accuracy = whole[1].benchmarks["heldout"].accuracy
    assert comparison.accuracies["perfect"] == {"heldout": 1.0, "average": 1.0}
    assert comparison.accuracies["eval"]["average"] == pytest.approx(accuracy)
    assert [(t.first, t.second) for t in comparison.tests] == [
        ("greedy", "eval"), ("greedy", "perfect"), ("eval", "perfect"),
    ]  # fmt: skip
    last = comparison.tests[2].differences["average"]
    assert last.value == pytest.approx(1 - accuracy) and last.significant and last.low > 0
    text = as_markdown(comparison)
    assert "| perfect | **100.0** | **100.0** |" in text
    assert f"| eval | <u>{100 * accuracy:.1f}</u> |" in text
    assert "Note: temperature differs: greedy 0.0, eval 1.0, perfect 1.0." in text


def test_compare_with_itself(whole, tmp_path):
    same = rewritten(whole[0], tmp_path / "same", lambda row: row)
    assert compare([whole[0], same]).tests[0].differences["average"].p == 1.0


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        ("engine", "vllm", 'engine differs: eval "native", other "vllm"'),
        ("success", 0.5, "success differs: eval 1.0, other 0.5"),
    ],
)
def test_compare_says_which_settings_differ(whole, tmp_path, key, value, note):
    other = rewritten(whole[0], tmp_path / "other", lambda row: row)
    content = json.loads((other / "result.json").read_text())
    content["settings"][key] = value
    (other / "result.json").write_text(json.dumps(content))
    assert compare([whole[0], other]).notes == (note,)


def test_compare_of_two_problems_has_no_star_and_says_why(whole, tmp_path):
    two = {row["id"] for row in read_items(whole[0])[:9]}  # eight responses to each
    worse, better = (
        rewritten(
            whole[0], tmp_path / name, lambda row, right=right: {**row, "right": right} if row["id"] in two else None
        )
        for name, right in {"worse": False, "better": True}.items()
    )
    text = as_markdown(compare([worse, better]))
    assert "| +100.0 | [+100.0, +100.0] | 0.500 |" in text
    assert "Note: fewer than 6 problems (heldout 2): no difference on them, nor on the average, can be told" in text


def test_compare_names_missing_items(whole, tmp_path):
    gone = read_items(whole[0])[0]["id"]
    partial = rewritten(whole[0], tmp_path / "partial", lambda row: None if row["id"] == gone else row)
    for folders in ([whole[0], partial], [partial, whole[0]]):
        with pytest.raises(UserError, match="partial lacks 1 items of heldout that eval has: ") as error:
            compare(folders)
        assert gone in str(error.value)


def test_compare_says_that_a_file_goes_by_its_own_name(whole, tmp_path):
    suite = rewritten(whole[0], tmp_path / "suite", lambda row: {**row, "benchmark": "sums"})
    content = json.loads((suite / "result.json").read_text())
    content["benchmarks"] = {"sums": content["benchmarks"]["heldout"]}
    (suite / "result.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"heldout, sums are in only one .* same --suite \(a file given by its path"):
        compare([whole[0], suite])


def test_compare_refuses_other_problems_and_unfinished_folders(whole, tmp_path):
    other = rewritten(whole[0], tmp_path / "other", lambda row: row)
    content = json.loads((other / "result.json").read_text())
    content["settings"]["problems"] = "x"
    (other / "result.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="were evaluated on different problems"):
        compare([whole[0], other])
    (other / "result.json").unlink()
    with pytest.raises(UserError, match="has no result.json: it is an unfinished evaluation"):
        compare([whole[0], other])
    with pytest.raises(UserError, match="at least 2"):
        compare([whole[0]])


@pytest.mark.parametrize("damaged", ['{"version": ', "[]", "", "[" * 100_000])
def test_a_damaged_result_or_setting_is_named(whole, options, tmp_path, damaged):
    other = rewritten(whole[0], tmp_path / "other", lambda row: row)
    (other / "result.json").write_text(damaged)
    with pytest.raises(UserError, match=r"other/result.json: not .*; run the evaluation's command again, or delete it"):
        compare([whole[0], other])
    (other / "settings.json").write_text(damaged)
    with pytest.raises(UserError, match=r"other/settings.json: not .*; give another --out or delete that folder"):
        run_evaluation(replace(options, out=other))
    with pytest.raises(UserError, match=r"other/settings.json: not "):
        run_evaluation(replace(options, out=other, dtype="float32", date="2024-07-26"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"benchmarks": []}, "needs an object as 'benchmarks'"),
        ({"benchmarks": {"heldout": 3}}, "heldout: not a JSON object"),
        ({"benchmarks": {"heldout": {}}}, "heldout: needs a text as 'title'"),
        ({"settings": None}, "needs an object as 'settings'"),
        ({"settings": {}}, "settings: needs a number as 'temperature'"),
    ],
)
def test_a_result_of_another_shape_is_named(whole, tmp_path, change, said):
    other = rewritten(whole[0], tmp_path / "other", lambda row: row)
    content = json.loads((other / "result.json").read_text())
    (other / "result.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=f"other/result.json: {said}; run the evaluation's command again, or delete it"):
        compare([whole[0], other])


@pytest.mark.parametrize(("key", "kind"), [("benchmark", "a text"), ("id", "a text"), ("score", "a number")])
def test_an_item_without_what_it_needs_is_named(whole, options, tmp_path, key, kind):
    other = rewritten(whole[0], tmp_path / "other", lambda row: {k: v for k, v in row.items() if k != key})
    for read in (lambda: compare([whole[0], other]), lambda: run_evaluation(replace(options, out=other))):
        with pytest.raises(
            UserError, match=f"other/items.jsonl: a line, .*: needs {kind} as '{key}'; mend or remove it"
        ):
            read()


# ---- the command line


def test_eval_from_the_shell(whole, problems, tmp_path):
    args = ["--suite", problems, "--k", 8, "--temperature", 1.0, "--max-tokens", 24, "--style", "plain"]
    command = ["eval", BASE, *args, "--reward", "gsm8k", "--out", tmp_path / "shell", "--chunk", 100]
    code, out, err = luffy(*command)
    assert code == 0, err
    assert out == (tmp_path / "shell" / "result.md").read_text() and out.startswith("# base on heldout.jsonl\n")
    lines = err.splitlines()
    assert re.fullmatch(r"100/192 responses \(52%\)  heldout  right .*eta \d.*", lines[0])
    assert lines[1].startswith("192/192 responses (100%)") and str(tmp_path / "shell") in lines[2]
    assert read_items(tmp_path / "shell") == read_items(whole[0])
    assert luffy(*command, "--json")[1] == (tmp_path / "shell" / "result.json").read_text()


def test_eval_of_columns_with_other_names(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"q": "21+3=?", "gold": "24"}) + "\n")
    command = ["eval", BASE, "--suite", path, "--max-tokens", 24, "--reward", "gsm8k", "--out", tmp_path / "out"]
    code, _, err = luffy(*command)
    assert code == 2 and "or with --column" in err
    code, _, err = luffy(*command, "--column", "prompt=q", "--column", "answer=gold")
    assert code == 0, err
    [item] = read_items(tmp_path / "out")
    assert (item["id"], item["answer"]) == ("own:1", "24")


def test_compare_from_the_shell(whole, greedy, tmp_path):
    code, out, err = luffy("eval", "compare", greedy, whole[0], "--out", tmp_path / "c", "--resamples", 200)
    assert code == 0, err
    assert out == (tmp_path / "c.md").read_text() and "200 resamples" in out
    saved = json.loads((tmp_path / "c.json").read_text())
    assert json.loads(luffy("eval", "compare", greedy, whole[0], "--json", "--resamples", 200)[1]) == saved


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("eval", BASE, "--suite", "math6"), "no data folder: give --data FOLDER or set LUFFY_DATA"),
        (("eval", BASE, "--suite", "nope"), "--suite nope: neither a suite"),
        (("eval", BASE, "--suite", "math6", "--column", "q"), "--column q: write it as ours=theirs"),
        (("eval", BASE, "--suite", "math6", "--environment", "tiny/luffy"), "the recipe has no environment"),
        (("eval", "compare", "nowhere", "else"), "nowhere: no such folder"),
        (("analyze", "nowhere"), "nowhere is neither a run (no metrics.jsonl) nor an evaluation"),
        (("analyze", "--gamma", "-1"), "--gamma must be above 0"),
    ],
)
def test_mistakes_are_one_line(args, message):
    code, _, err = luffy(*args)
    assert code == 2
    assert err.strip().splitlines()[-1].startswith("luffy: error: ") and message in err


def test_help_tells_of_both_ways():
    code, out, _ = luffy("eval", "--help")
    assert code == 0 and "luffy eval MODEL --suite" in out and "compare" in out
    code, out, _ = luffy("eval", "model", "--help")
    assert code == 0 and "--temperature" in out


@pytest.mark.parametrize(("asked", "of_recipe", "found"), [(3, 1, 3), (None, 1, 1), (None, None, 2)])
def test_workers_asked_for_come_before_those_of_the_recipe(asked, of_recipe, found):
    settings = RewardConfig(kind="loop_rewards:length_parity", workers=of_recipe)
    with plan.reward_of(
        Options("model", "suite", workers=asked, reward_settings=settings), "math"
    ).verifier() as verifier:
        [reward] = verifier._rewards.values()
        assert len(reward._pool.pids) == found


# ---- analyze, which is in studies/paper


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.studies
def test_analyze_draws_what_the_folders_allow(whole, options, problems, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sacrebleu")
    cooler = tmp_path / "cooler"
    run_evaluation(replace(options, out=cooler, temperature=0.5))
    run = tmp_path / "run"
    run.mkdir()
    steps = [
        {"step": s, "critic/rewards/mean": s / 10, "response_length/mean": 9.0, "actor/entropy_loss": 1 / s}
        for s in (1, 2, 3)
    ]
    write_rows(run / "metrics.jsonl", ({**row, "actor/pg_clipfrac": 0.0} for row in steps))
    problem = json.loads(problems.read_text().splitlines()[0])
    samples = [
        {"step": 1, "problem": problem["id"], "response": "#", "off_policy": [0]},
        {"step": 1, "problem": problem["id"], "response": problem["traces"][0], "off_policy": [1, 1]},
        {"step": 2, "problem": problem["id"], "response": problem["traces"][0] + " #", "off_policy": [0, 0]},
    ]
    write_rows(run / "samples.jsonl", samples)
    code, out, err = luffy("analyze", run, whole[0], cooler, "--out", tmp_path / "figures", "--data", problems)
    assert code == 0, err
    names = ["shaping", "dynamics", "clipping", "lengths", "temperatures", "bleu"]
    assert [Path(line.split("  ")[0]).stem for line in out.splitlines()[:-1]] == names
    for name in names:
        assert (tmp_path / "figures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert f"({name}.png)" in (tmp_path / "figures" / "analysis.md").read_text()
    dynamics = read_csv(tmp_path / "figures" / "dynamics.csv")
    assert [float(r["y"]) for r in dynamics if r["panel"] == "reward"] == [0.1, 0.2, 0.3]
    curve = read_csv(tmp_path / "figures" / "temperatures.csv")
    assert [float(r["x"]) for r in curve] == [0.5, 1.0]
    assert float(curve[1]["y"]) == pytest.approx(whole[1].benchmarks["heldout"].pass_at[8])
    bleu = {r["x"]: float(r["y"]) for r in read_csv(tmp_path / "figures" / "bleu.csv") if r["series"] == "run"}
    assert bleu["1.0"] < 5 < 50 < bleu["2.0"]  # the trace itself in step 1 is the teacher's and does not count


def stand_in_run(folder, steps, **settings):
    """The records of a run: two seconds a step on four GPUs."""
    folder.mkdir(parents=True)
    rows = [{"step": s, "timing_s/step": 2.0, "actor/entropy_loss": 1.0} for s in range(1, steps + 1)]
    write_rows(folder / "metrics.jsonl", rows)
    shared = {"launch": "torchrun", "parallel": {"workers": 4}, "batch": {"problems": 1000}, "rollout": {"n": 8}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**shared, "name": folder.name, **settings}))
    return folder


@pytest.mark.studies
def test_analyze_counts_hours_and_data_of_runs_as_table_2(tmp_path):
    pytest.importorskip("matplotlib")
    luffy_run, sft = tmp_path / "runs" / "luffy", tmp_path / "runs" / "sft"
    stand_in_run(luffy_run, 9, data={"train": "x"}, model={"path": "base"})
    rows = [json.loads(line) | {"critic/rewards/mean": 0.5} for line in (luffy_run / "metrics.jsonl").open()]
    write_rows(luffy_run / "metrics.jsonl", rows)
    stand_in_run(sft, 18, data={"train": "x"}, model={"path": "base"})
    after = stand_in_run(tmp_path / "runs" / "sft-rl", 9, data={"train": "x"}, guidance={"n_prefix": 0},
                         model={"path": str(sft / "checkpoints" / "step-000018" / "model")})  # fmt: skip
    (after / "metrics.jsonl").write_text((luffy_run / "metrics.jsonl").read_text())
    assert luffy("analyze", luffy_run, sft, after, "--out", tmp_path / "a")[0] == 0
    found = {}
    for row in read_csv(tmp_path / "a" / "resources.csv"):
        found.setdefault(row["series"], {})[row["panel"]] = float(row["y"])
    hours = 9 * 2 * 4 / 3600
    assert found["luffy"] == {"time": pytest.approx(hours), "on-policy responses": 63, "traces": 9}
    assert found["sft"] == {"time": pytest.approx(2 * hours), "on-policy responses": 0, "traces": 18}
    assert found["sft-rl"] == {"time": pytest.approx(3 * hours), "on-policy responses": 72, "traces": 18}


@pytest.mark.studies
def test_analyze_sets_evaluations_side_by_side_and_over_gamma(whole, tmp_path):
    pytest.importorskip("matplotlib")
    shapes = {"a": "p_div_p_0.5", "b": "p_div_p_0.05", "other": "no_reshape"}
    for name, shape in shapes.items():
        run = stand_in_run(tmp_path / "runs" / name, 1, algorithm={"off_policy_reshape": shape}, model={"path": "base"})
        folder = shutil.copytree(whole[0], tmp_path / "evals" / name)
        result = json.loads((folder / "result.json").read_text())
        model = str(run / "checkpoints" / "latest" / "model")
        result["settings"] |= {"model": model, "model_identity": model}
        result["benchmarks"]["heldout"]["accuracy"] = len(name) / 10
        (folder / "result.json").write_text(json.dumps(result))
    (tmp_path / "runs" / "a" / "config.yaml").write_text("{broken")
    assert luffy("analyze", tmp_path / "evals", "--out", tmp_path / "x")[0] == 0
    assert not (tmp_path / "x" / "gamma.csv").exists()  # one gamma is no curve
    stand_in_run(tmp_path / "c", 1, algorithm={"off_policy_reshape": "p_div_p_0.5"}, model={"path": "base"})
    shutil.copy(tmp_path / "c" / "config.yaml", tmp_path / "runs" / "a" / "config.yaml")
    assert luffy("analyze", tmp_path / "evals", "--out", tmp_path / "y")[0] == 0
    bars = {row["series"]: float(row["y"]) for row in read_csv(tmp_path / "y" / "accuracy.csv")}
    assert bars == {"a": 10.0, "b": 10.0, "other": 50.0}
    assert [(float(r["x"]), float(r["y"])) for r in read_csv(tmp_path / "y" / "gamma.csv")] == [
        (0.05, 10.0),
        (0.5, 10.0),
    ]


@pytest.mark.studies
def test_analyze_lengths_are_shares(whole, tmp_path):
    pytest.importorskip("matplotlib")
    assert luffy("analyze", whole[0], "--out", tmp_path)[0] == 0
    rows = read_csv(tmp_path / "lengths.csv")
    for series in ("right", "wrong"):
        assert sum(float(r["y"]) for r in rows if r["series"] == series) == pytest.approx(1.0)


@pytest.mark.studies
def test_analyze_without_folders_draws_the_shaping_curves(tmp_path):
    pytest.importorskip("matplotlib")
    code, out, _ = luffy("analyze", "--out", tmp_path, "--gamma", 0.1)
    assert code == 0 and len(out.splitlines()) == 2
    rows = read_csv(tmp_path / "shaping.csv")
    for row in rows:
        p, y = float(row["x"]), float(row["y"])
        if row["series"] == "p / (p + 0.1)":
            expected = p / (p + 0.1) if "function" in row["panel"] else 0.1 / (p + 0.1) ** 2 * p * (1 - p)
            assert y == pytest.approx(expected, abs=1e-9)


@pytest.mark.studies
def test_pass_at_k_needs_enough_samples(whole, greedy, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = luffy("analyze", whole[0], greedy, "--out", tmp_path)
    assert code == 0 and "lengths.png" in out and "temperatures.png" not in out
    assert "greedy has 1 samples per problem, pass@8 needs 8; lower --k to 1" in err
    assert "lower --k to 1" in (tmp_path / "analysis.md").read_text()


@pytest.mark.studies
def test_analyze_several_suites(whole, options, problems, tmp_path):
    """A panel for each suite that has two temperatures; one that has a single one is no obstacle."""
    pytest.importorskip("matplotlib")
    rows = problems.read_text().splitlines()[:2]
    (tmp_path / "few.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "one.jsonl").write_text(rows[0] + "\n")
    few = replace(options, suite=str(tmp_path / "few.jsonl"), limit=None)
    for name, temperature in (("warm", 1.0), ("cool", 0.5)):
        run_evaluation(replace(few, out=tmp_path / name, temperature=temperature))
    run_evaluation(replace(few, suite=str(tmp_path / "one.jsonl"), out=tmp_path / "other"))
    code, _, err = luffy("analyze", whole[0], *(tmp_path / n for n in ("warm", "cool", "other")), "--out", tmp_path)
    assert code == 0 and err == "", err
    curve = read_csv(tmp_path / "temperatures.csv")
    assert {row["panel"] for row in curve} == {"few"} and [float(row["x"]) for row in curve] == [0.5, 1.0]


@pytest.mark.studies
def test_analyze_labels_runs_by_their_path(tmp_path):
    pytest.importorskip("matplotlib")
    for method in ("luffy", "sft"):
        folder = tmp_path / "runs" / method / "seed-0"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 1, "critic/rewards/mean": 0.5}\n')
    assert luffy("analyze", tmp_path / "runs", "--out", tmp_path)[0] == 0
    assert [r["series"] for r in read_csv(tmp_path / "dynamics.csv")] == ["luffy/seed-0", "sft/seed-0"]


@pytest.mark.studies
def test_analyze_leaves_out_values_that_are_not_finite(tmp_path):
    pytest.importorskip("matplotlib")
    run = tmp_path / "run"
    run.mkdir()
    values = ("NaN", "0.5", "Infinity", "-Infinity", "0.7")
    lines = [f'{{"step": {step}, "critic/rewards/mean": {value}}}\n' for step, value in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(lines))
    code, _, err = luffy("analyze", run, "--out", tmp_path)
    assert code == 0 and err == "", err
    assert [(float(r["x"]), float(r["y"])) for r in read_csv(tmp_path / "dynamics.csv")] == [(1, 0.5), (4, 0.7)]
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", (tmp_path / "analysis.json").read_text()))


@pytest.mark.parametrize("damaged", ["[]", "[" * 100_000])
@pytest.mark.studies
def test_analyze_names_a_damaged_line(tmp_path, damaged):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/rewards/mean": 0.5}\n' + damaged + "\n")
    code, _, err = luffy("analyze", tmp_path, "--out", tmp_path)
    assert code == 2 and re.search(r"metrics\.jsonl: a line, '\[.*: not .*; mend or remove it", err), err
