"""The live page and the report in a real browser: `make test-view` sets one up."""

import json
import os
import random
import shutil
import time

import pytest

from luffy.report.html import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-view")

HOSTILE = "</pre><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\u202egnp \u05e9\u05dc\u05d5\u05dd \U0001f680 $\\frac{1}{2}$ \\boxed{4}"


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        program = own if os.path.exists(own) else shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("needs chromium: playwright install chromium, or a system package")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """``open_page(url, width=390)``; at the end nothing may have gone wrong, and nothing asked of elsewhere."""
    pages, wrong = [], []

    def start(url, width=1280, scheme="light"):
        page = chromium.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda r: (
                wrong.append(r.url)
                if not r.url.startswith(url.split("#")[0].split("?")[0]) and not r.url.startswith("data:")
                else None
            ),
        )
        page.goto(url)
        pages.append(page)
        return page

    yield start
    for page in pages:
        page.close()
    assert wrong == []


def until(page, script, seconds=6.0):
    """Asked from outside: the page's own policy forbids what ``wait_for_function`` does."""
    end = time.monotonic() + seconds
    while not page.evaluate(script):
        assert time.monotonic() < end, f"never true: {script}"
        page.wait_for_timeout(30)


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


@pytest.fixture
def two_methods(write_run, make_metric_row, make_sample_row, tmp_path):
    for name, n_prefix in (("grpo", 0), ("luffy", 1)):
        for seed in (0, 1):
            rows = [
                make_metric_row(s, 0.02 * s * (1 + n_prefix) + 0.05 * seed, time=1000 * n_prefix + 100 * seed + s)
                for s in range(1, 21)
            ]
            samples = [
                make_sample_row(
                    step, k, problem=f"p{p}", reward=float(k == 0), off_policy=[int(k == 0 and n_prefix)] * 3,
                    overrides=[0, 0, int(k == 1)], finish="length" if k == 2 else "stop",
                    response=f"a b c{p}", tokens=["a", " b", f" c{p}"], log_probs=[-0.1, -1.0, -3.0],
                    policy_probs=[0.9, 0.4, 0.05], gradient_weights=[0.01, 0.2, 0.9],
                )
                for step in (1, 10, 20) for p in range(4) for k in range(3)
            ]  # fmt: skip
            config = {"guidance": {"n_prefix": n_prefix}, "train": {"steps": 30}}
            write_run(f"{name}/seed-{seed}", rows, config, samples)
    return tmp_path / "runs"


def test_curves_are_drawn_smoothed_and_chosen(serving, two_methods, open_page):
    with serving([two_methods]) as client:
        page = open_page(client.url)
        page.wait_for_selector("#charts .chart")
        assert page.locator("#charts figure").count() >= 8
        assert page.locator("#charts .band").count() >= 2
        first = page.locator("#charts .mean.m1").first.get_attribute("d")
        assert first.count("L") == 19  # twenty steps
        page.locator("#smoothing").fill("0.9")
        until(page, f"document.querySelector('#charts .mean.m1').getAttribute('d') !== {json.dumps(first)}")
        page.get_by_role("checkbox", name="grpo").uncheck()
        until(page, "!document.querySelector('#charts .mean.m0')")
        page.locator("#add-chart").select_option("timing_s/step")
        page.wait_for_selector('[data-chart="timing_s/step"] .chart')
        page.locator("#charts .chart").first.focus()
        page.keyboard.press("ArrowLeft")
        assert "step 20" in page.locator("#charts .readout:not([hidden])").inner_text()
        page.keyboard.press("Escape")
        page.keyboard.press("d")
        until(page, "document.querySelector('#knobs').innerText.includes('There is only one')")
        page.keyboard.press("c")
        page.get_by_role("checkbox", name="grpo").check()
        page.keyboard.press("d")
        page.wait_for_selector("#knobs table")
        assert "guidance.n_prefix" in page.locator("#knobs").inner_text()
        assert page.locator("#changes").is_hidden()
        (two_methods / "luffy" / "seed-1" / "config-step-000001.yaml").write_text("optim: {lr: 0.5}")
        page.locator("#by").select_option("run")
        page.wait_for_selector("#changes table")
        assert "optim.lr" in page.locator("#change-table").inner_text()


def test_the_page_follows_a_run(serving, two_methods, open_page, make_metric_row, make_sample_row):
    with serving([two_methods]) as client:
        page = open_page(client.url)
        page.wait_for_selector("#charts .chart")
        assert "4 not at the last step" in page.locator("#facts").inner_text()
        for seed in (0, 1):
            with (two_methods / "luffy" / f"seed-{seed}" / "metrics.jsonl").open("a") as file:
                file.writelines(json.dumps(make_metric_row(s, 0.9)) + "\n" for s in range(21, 31))
                file.write('{"step": 31, "val-c')  # in the middle of a line
        until(page, "document.querySelector('#charts .chart').getAttribute('aria-label').includes('at step 30')")
        assert "2 not at the last step" in page.locator("#facts").inner_text()
        page.keyboard.press("s")
        page.wait_for_selector("#group .sample")
        assert page.locator("#count").inner_text() == "36 samples"
        page.keyboard.press("j")
        until(page, "document.querySelector('.row[aria-selected=true]').id === 'row-1'")
        with (two_methods / "luffy" / "seed-1" / "samples.jsonl").open("a") as file:
            file.write(json.dumps(make_sample_row(30, problem="new")) + "\n")
        until(page, "document.querySelector('#count').innerText === '37 samples'")
        assert page.locator(".row[aria-selected=true]").get_attribute("id") == "row-1"  # where the reader was


def test_filters_search_and_keys(serving, two_methods, open_page):
    with serving([two_methods]) as client:
        page = open_page(client.url + "#/samples")
        page.wait_for_selector("#group .sample")
        count = page.locator("#count")
        for name, value, left in (
            ("reward", "solved", 12),
            ("off_policy", "teacher", 12),
            ("off_policy", "override", 12),
        ):
            page.locator(f"[name={name}]").select_option(value)
            until(page, f"document.querySelector('#count').innerText === '{left} of 36 samples'")
            page.locator(f"[name={name}]").select_option("")
        page.get_by_label("truncated").check()
        until(page, "document.querySelector('#count').innerText === '12 of 36 samples'")
        page.get_by_label("truncated").uncheck()
        page.locator("[name=shortest]").fill("4")
        page.locator("[name=shortest]").blur()
        until(page, "document.querySelector('#group').innerText.includes('No sample passes')")
        page.locator("[name=shortest]").fill("")
        page.locator("[name=shortest]").blur()
        until(page, "document.querySelector('#count').innerText === '36 samples'")
        page.locator("#list").focus()
        page.keyboard.press("/")
        page.keyboard.type("C2")
        until(page, "document.querySelector('#count').innerText === '9 of 36 samples'")
        until(page, "document.querySelector('#group dl').innerText.includes('p2')")
        page.keyboard.press("Escape")  # back to the list
        assert page.evaluate("document.activeElement.id") == "list"
        page.keyboard.press("ArrowDown")
        until(page, "document.querySelectorAll('.sample')[1].classList.contains('chosen')")
        page.keyboard.press("End")
        until(page, "document.querySelector('#at-step-value').innerText === '20 (3 of 3)'")
        page.keyboard.press("[")
        until(page, "document.querySelector('#at-step-value').innerText === '10 (2 of 3)'")
        page.keyboard.press("]")
        until(page, "document.querySelector('#at-step-value').innerText === '20 (3 of 3)'")
        page.locator("#at-step").fill("0")
        until(page, "document.querySelector('#at-step-value').innerText === '1 (1 of 3)'")
        page.keyboard.press("?")
        assert page.locator("#keys").is_visible()
        page.keyboard.press("Escape")
        assert count.inner_text() == "9 of 36 samples"


def test_tokens_are_coloured_one_way_at_a_time(serving, two_methods, open_page):
    with serving([two_methods / "luffy"]) as client:
        page = open_page(client.url + "#/samples")
        page.wait_for_selector("#group .sample")
        colour = lambda nth, of: page.evaluate(  # noqa: E731
            f"getComputedStyle(document.querySelectorAll('.sample')[{nth}].querySelectorAll('.response > *')[{of}]).backgroundColor"
        )
        nothing = "rgba(0, 0, 0, 0)"
        assert colour(0, 0) == "rgb(255, 224, 160)"  # the teacher's
        assert colour(1, 0) == nothing
        assert colour(1, 2) == "rgb(217, 201, 245)"  # an override
        page.keyboard.press("2")
        assert colour(0, 0) == nothing  # probability 0.9
        assert colour(0, 2) == colour(1, 2) == "rgba(0, 114, 178, 0.62)"  # 0.05, whoever wrote it
        page.keyboard.press("3")
        assert colour(1, 0) == "rgba(178, 60, 0, 0.06)"  # weight 0.01
        assert colour(1, 2) == "rgba(178, 60, 0, 0.66)"  # 0.9
        assert page.locator(".key:visible").count() == 1
        assert page.locator(".sample").nth(1).locator(".response > *").nth(2).get_attribute("title") == (
            "override, probability 0.05, gradient weight 0.9"
        )


def test_turns_of_policy_teacher_and_environment_look_different(
    serving, write_run, make_metric_row, make_sample_row, open_page
):
    episode = {"turns": 2, "calls": 1, "end": "turns", "replies": [[1, 2]], "reward": 0.0, "faults": ["unknown_tool"]}
    rows = [
        make_sample_row(1, 0, problem="p0", off_policy=[1, 0, 1], turns=2, replies=[[1, 2]], finish="trace"),
        make_sample_row(1, 1, problem="p0", off_policy=[0, 0, 0], **episode),
        make_sample_row(1, 2, problem="p0", off_policy=[0, 0, 0]),
    ]
    with serving([write_run("a", [make_metric_row(1, 0.5)], samples=rows)]) as client:
        page = open_page(client.url + "#/samples")
        page.wait_for_selector("#group .sample")
        colours = page.evaluate(
            "[...document.querySelectorAll('.sample')].map(s => "
            "[...s.querySelectorAll('.response > *')].map(t => getComputedStyle(t).backgroundColor))"
        )
        nothing, teacher, reply = "rgba(0, 0, 0, 0)", "rgb(255, 224, 160)", "rgb(205, 234, 228)"
        assert colours == [[teacher, reply, teacher], [nothing, reply, nothing], [nothing] * 3]
        assert "environment's reply, in no loss" in texts(page, ".key mark:visible")
        assert texts(page, "#list .tag.reply") == ["2↔", "2↔"]
        chips = " ".join(texts(page, ".sample .chips"))
        assert all(said in chips for said in ("2 turns, 1 call", "no turns left", "unknown tool"))
        page.locator("select[name=off_policy]").select_option("turns")
        until(page, "document.querySelector('#count').innerText === '2 of 3 samples'")


def test_hostile_text_is_shown_inert(serving, write_run, make_metric_row, make_sample_row, open_page):
    hostile = {"prompt": HOSTILE, "answer": HOSTILE, "response": HOSTILE, "status": HOSTILE}
    rows = [
        make_sample_row(1, 0, problem=HOSTILE, tokens=[HOSTILE], off_policy=[1], log_probs=[0.0], **hostile),
        make_sample_row(1, 1, problem=HOSTILE, tokens=["x" * 1_000_000], off_policy=[0], log_probs=[-1.0], **{**hostile, "response": "x" * 1_000_000}),
        make_sample_row(1, 2, problem=HOSTILE, tokens=[" y"] * 5000, off_policy=[0] * 5000, log_probs=[-1.0] * 5000, **{**hostile, "response": " y" * 5000}),
    ]  # fmt: skip
    config = {"name": "<script>window.hacked=3</script>", "model": {"path": "<img src=x onerror='window.hacked=4'>"}}
    folder = write_run("a", [make_metric_row(1, 0.5, **{"<img src=x onerror='window.hacked=5'>": 1.0})], config, rows)
    write_run("b", [make_metric_row(1, 0.5)], {"name": "b"})
    with serving([folder.parent]) as client:
        page = open_page(client.url + "#/samples")
        page.wait_for_selector("#group .sample")
        assert page.locator(".sample").count() == 3
        shown = page.locator("#group").inner_text()
        assert "<script>window.hacked=1</script>" in shown
        assert "U+202E" in shown and "\u202e" not in shown
        assert "\u05e9\u05dc\u05d5\u05dd \U0001f680 $\\frac{1}{2}$" in shown
        started = time.perf_counter()
        page.locator(".sample button").nth(0).click()
        until(page, "document.querySelectorAll('.sample')[1].querySelector('.response').textContent.length === 1000000")
        page.evaluate("new Promise(requestAnimationFrame)")
        print(f"a response of a megabyte, whole: {time.perf_counter() - started:.2f} s")
        page.locator(".sample button").nth(0).click()
        until(page, "document.querySelectorAll('.sample')[2].querySelector('.response').textContent.length === 10000")
        page.keyboard.press("c")
        page.locator("#add-chart").select_option("<img src=x onerror='window.hacked=5'>")
        page.wait_for_selector("[data-chart^='<img'] .chart")
        page.keyboard.press("d")
        page.wait_for_selector("#knobs table")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main iframe").count() == 0


def test_ten_thousand_samples(serving, write_run, make_metric_row, make_sample_row, open_page):
    draw = random.Random(0)
    rows = []
    for i in range(10_000):
        n = draw.randint(40, 160)
        tokens = [f" {draw.randint(0, 999)}" for _ in range(n)]
        rows.append(
            make_sample_row(
                i // 80,
                i % 8,
                problem=f"p{i // 8}",
                tokens=tokens,
                token_ids=list(range(n)),
                response="".join(tokens),
                off_policy=[0] * n,
                log_probs=[-0.12345] * n,
                advantages=[0.123456] * n,
            )  # fmt: skip
        )
    folder = write_run("a", [make_metric_row(s) for s in range(1, 125)], samples=rows)
    with serving([folder]) as client:
        page = open_page(client.url + "#/samples")
        page.wait_for_selector(".row")
        taken = page.evaluate("performance.now()") / 1000  # since the address was entered
        print(f"10,000 samples, {(folder / 'samples.jsonl').stat().st_size / 1e6:.0f} MB: first paint in {taken:.2f} s")
        until(
            page, "document.querySelector('#count').innerText === '10,000 samples'", 20
        )  # an older file: parsed whole
        assert page.locator(".row").count() < 60  # only what is seen exists
        page.locator("#list").focus()
        page.keyboard.press("End")
        until(page, "document.querySelector('.row[aria-selected=true]')?.id === 'row-9999'")
        longest, most_rows = page.evaluate(
            """async () => {
                const list = document.getElementById("list");
                let longest = 0, mostRows = 0, last = performance.now();
                for (let i = 0; i < 60; i += 1) {
                    list.scrollTop = (i * 7919 * 52) % (10000 * 52);
                    await new Promise(requestAnimationFrame);
                    const now = performance.now();
                    longest = Math.max(longest, now - last);
                    mostRows = Math.max(mostRows, document.querySelectorAll(".row").length);
                    last = now;
                }
                return [longest, mostRows];
            }"""
        )
        print(f"longest frame while jumping through the list: {longest:.0f} ms")
        assert 0 < most_rows < 60


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_on_a_phone_and_in_the_dark(serving, two_methods, open_page, width, scheme):
    with serving([two_methods]) as client:
        page = open_page(client.url, width, scheme)
        page.wait_for_selector("#charts .chart")
        for tab, ready in (
            ("curves", "#charts .chart"),
            ("samples", "#group .sample"),
            ("differences", "#knobs table"),
        ):
            page.locator(f"#tab-{tab}").click()
            page.wait_for_selector(ready)
            assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing to push sideways
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)"
        assert dark == (scheme == "dark")
        page.locator("#theme").click()
        assert (page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)") != dark


def test_everything_has_a_name_and_can_be_reached_by_tab(serving, two_methods, open_page):
    with serving([two_methods]) as client:
        page = open_page(client.url + "#/samples")
        page.wait_for_selector("#group .sample")
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, [role=listbox]")].filter(
                (e) => !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim())).map((e) => e.outerHTML)"""
        )
        assert nameless == []
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate(
                    "document.activeElement.id || document.activeElement.name || document.activeElement.className"
                )
            )
        assert {"tab-samples", "theme", "run", "reward", "search", "list", "colour", "at-step", "response"} <= reached
        assert page.locator('[role=tab][aria-selected="true"]').inner_text() == "Samples"


def test_the_address_brings_back_the_sample(serving, two_methods, open_page):
    with serving([two_methods]) as client:
        page = open_page(client.url + "#/samples")
        page.wait_for_selector("#group .sample")
        page.locator("#list").focus()
        page.keyboard.press("PageDown")
        until(page, "document.querySelector('#group dl').innerText.includes('p3')")
        chosen = page.locator(".row[aria-selected=true]").get_attribute("id")
        page.reload()
        until(page, f"document.querySelector('.row[aria-selected=true]')?.id === '{chosen}'")


@pytest.mark.parametrize("tab", ["samples", "differences", "curves"])
def test_a_tab_by_its_name_in_the_address(serving, two_methods, open_page, tab):
    with serving([two_methods]) as client:
        page = open_page(f"{client.url}#{tab}")
        until(page, f"document.querySelector('[aria-selected=true][role=tab]').id === 'tab-{tab}'")
        assert page.locator(f"#{tab}").is_visible()
        page.evaluate("location.hash = 'samples'")  # entered while the page is open
        page.wait_for_selector("#group .sample")


def test_a_samples_address_entered_on_the_open_page(serving, two_methods, open_page):
    with serving([two_methods]) as client:
        runs = [run["id"] for method in client.get("/api/state")["methods"] for run in method["runs"]]
        page = open_page(client.url + "#samples")
        page.wait_for_selector("#group .sample")
        page.evaluate(f"location.hash = '/samples/{runs[0]}/train/7'")
        until(page, "document.querySelector('.row[aria-selected=true]')?.id === 'row-7'")
        assert page.locator("[name=run]").input_value() == runs[0]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_waits_for_the_first_step(serving, make_metric_row, tmp_path, open_page, width, scheme, monkeypatch):
    monkeypatch.setattr("luffy.view.live.LOOK_FOR_RUNS_S", 0.0)
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    with serving([run.parent]) as client:
        page = open_page(client.url + "#/differences", width, scheme)
        page.wait_for_selector("#waiting:not([hidden])")
        assert page.locator("#facts").inner_text() == "waiting for the first step"
        assert "No run has begun in or below:" in page.locator("#waiting").inner_text()
        assert texts(page, "#waiting code") == [str(run.parent)]
        assert page.locator(".panel:visible, [role=tab]:visible, #remarks:visible").count() == 0
        (run / "config.yaml").write_text("name: a\n")
        until(page, "document.querySelector('#waiting').innerText.includes('Begun, no step yet:')")
        assert texts(page, "#waiting code") == [str(run)]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        (run / "metrics.jsonl").write_text(json.dumps(make_metric_row(1, 0.1)) + "\n")
        page.wait_for_selector("#differences", state="visible")  # the tab of the address
        assert page.locator("#waiting").is_hidden()
        page.keyboard.press("c")
        page.wait_for_selector("#charts .chart")
        (run.parent / "b").mkdir()
        (run.parent / "b" / "config.yaml").write_text("name: b\n")
        until(page, "document.querySelector('#remarks').innerText.includes('b: no step yet')")


def test_the_address_is_kept_until_its_run_comes(serving, two_methods, open_page, monkeypatch):
    """A run that starts anew under an open bookmark."""
    monkeypatch.setattr("luffy.view.live.LOOK_FOR_RUNS_S", 0.0)
    metrics = two_methods / "luffy" / "seed-0" / "metrics.jsonl"
    recorded = metrics.read_text()
    with serving([metrics.parent]) as client:
        run = client.run
        metrics.write_text("")
        page = open_page(f"{client.url}#/samples/{run}/train/7")
        page.wait_for_selector("#waiting:not([hidden])")
        metrics.write_text(recorded)
        until(page, "document.querySelector('.row[aria-selected=true]')?.id === 'row-7'")


def test_a_server_that_ends_is_said_to_have(serving, two_methods, chromium):
    with serving([two_methods]) as client:
        page = chromium.new_page()
        page.goto(client.url)
        page.wait_for_selector("#charts .chart")
        page.route("**/api/**", lambda route: route.abort())
        until(page, "document.querySelector('#remarks').innerText.includes('does not answer')")
        page.unroute("**/api/**")
        until(page, "document.querySelector('#remarks').hidden")
        page.close()


def test_the_token_opens_the_page(serving, two_methods, open_page):
    token = "a-token-of-some-length"
    with serving([two_methods], token=token) as client:
        page = open_page(f"{client.url}?token={token}")
        page.wait_for_selector("#charts .chart")
        assert token not in page.url


def test_the_report_has_the_same_components(two_methods, open_page):
    page = open_page(write_report([two_methods]).as_uri())
    page.locator(".chart").first.focus()
    page.keyboard.press("ArrowLeft")
    assert "step 20" in page.locator(".readout:not([hidden])").inner_text()
    assert page.locator(".group:visible").count() == 2  # two problems at the first step
    page.locator("select.colour").select_option("weight")
    assert page.locator("#samples").get_attribute("data-colour") == "weight"
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.group:not([hidden]) .w9')).backgroundColor")
        == "rgba(178, 60, 0, 0.66)"
    )
