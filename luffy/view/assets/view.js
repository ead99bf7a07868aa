"use strict";
// The live page: looks for news every two seconds, places what the server drew, and listens to keys.
(() => {
  const POLL_MS = 2000;
  const at = (id) => document.getElementById(id);
  const page = { version: "", state: null, tab: "curves", off: new Set(), added: [], stale: { curves: true, differences: true } };

  async function get(path, parameters) {
    const query = new URLSearchParams(parameters);
    const reply = await fetch(`${path}?${query}`);
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.error || `status ${reply.status}`);
    return body;
  }
  luffy.get = get;

  function say(lines) {
    const list = at("remarks");
    list.replaceChildren(...lines.map((line) => {
      const item = document.createElement("li");
      item.textContent = line;
      return item;
    }));
    list.hidden = !lines.length;
  }

  // Without a step there is nothing to draw: the page says what it waits for, and hides what would be empty.
  function showWaiting() {
    const { methods, waiting, places } = page.state, empty = !methods.length;
    at("waiting").hidden = !empty;
    at("tabs").hidden = empty;
    document.querySelector("main").classList.toggle("empty", empty);
    at("waiting-for").textContent = waiting.length ? "Begun, no step yet:" : "No run has begun in or below:";
    at("waiting-folders").replaceChildren(...(waiting.length ? waiting : places).map((folder) => {
      const item = document.createElement("li");
      item.append(Object.assign(document.createElement("code"), { textContent: folder }));
      return item;
    }));
    return empty;
  }

  function facts() {
    const runs = page.state.methods.flatMap((method) => method.runs);
    const going = runs.filter((run) => run.unfinished).length;
    const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
    at("facts").textContent = [count(page.state.methods.length, "method"), count(runs.length, "run"),
      going ? `${going} not at the last step` : "all at their last step"].join(" · ");
  }

  const chosen = () => page.state.methods.filter((method) => !page.off.has(method.style));
  function choice() {
    const kept = chosen().map((method) => ["method", String(method.style)]);
    return kept.length ? kept : [["method", "-1"]];
  }

  function showMethods() {
    at("methods").replaceChildren(...page.state.methods.map((method) => {
      const label = document.createElement("label");
      const box = document.createElement("input");
      box.type = "checkbox";
      box.checked = !page.off.has(method.style);
      box.addEventListener("change", () => {
        if (box.checked) page.off.delete(method.style); else page.off.add(method.style);
        outdated();
      });
      const mark = document.createElement("span");
      mark.innerHTML = method.swatch;
      const steps = method.runs.map((run) => `seed ${run.seed ?? "?"}: ${run.steps}`).join(", ");
      const sub = document.createElement("span");
      sub.className = "sub";
      sub.textContent = `steps ${[...new Set(method.runs.map((run) => run.steps))].join(", ")}`;
      label.title = steps;
      label.append(box, mark, method.label, sub);
      return label;
    }));
  }

  function showMetrics() {
    const select = at("add-chart"), drawn = new Set([...page.state.charts, ...page.added]);
    const options = page.state.metrics.filter((metric) => !drawn.has(metric)).map((metric) => new Option(metric, metric));
    select.replaceChildren(new Option("choose…", ""), ...options);
    at("clear-charts").hidden = !page.added.length;
  }

  // A chart that is being read stays until the pointer has left it.
  const isRead = () => Boolean(document.querySelector("#charts .readout:not([hidden])"));

  async function drawCurves() {
    if (isRead()) return;
    page.stale.curves = false;
    const smoothing = at("smoothing").value;
    const wanted = [...choice(), ...page.added.map((metric) => ["metric", metric]), ["smoothing", smoothing]];
    const [curves, tables] = await Promise.all([get("/api/curves", wanted), get("/api/tables", choice())]);
    const focused = document.activeElement?.closest?.("#charts figure")?.dataset.chart;
    at("charts").innerHTML = curves.html;
    document.querySelectorAll("#charts figure").forEach((figure) => {
      luffy.readout(figure);
      if (figure.dataset.chart === focused) figure.querySelector(".chart").focus({ preventScroll: true });
    });
    at("chart-remarks").replaceChildren(...curves.remarks.map((line) => Object.assign(document.createElement("li"), { textContent: line })));
    for (const name of ["final", "phases", "runs"]) at(name).innerHTML = tables[name];
  }

  async function drawDifferences() {
    page.stale.differences = false;
    const knobs = await get("/api/knobs", [...choice(), ["by", at("by").value]]);
    const none = knobs.columns > 1 ? "They have the same settings." : "There is only one; nothing to compare.";
    if (knobs.html) at("knobs").innerHTML = knobs.html;
    else at("knobs").replaceChildren(Object.assign(document.createElement("p"), { className: "note", textContent: none }));
    at("changes").hidden = !knobs.changes;
    at("change-table").innerHTML = knobs.changes;
  }

  const draw = { curves: drawCurves, differences: drawDifferences };
  async function refresh() {
    if (page.stale[page.tab]) await draw[page.tab]();
  }
  function outdated() {
    page.stale = { curves: true, differences: true };
    attempt(refresh);
  }

  // A server that is gone is said to be, and looked for again.
  async function attempt(work) {
    try {
      await work();
    } catch (error) {
      const gone = error instanceof TypeError;
      say([gone ? "The server does not answer; is luffy view still running?" : error.message]);
      if (gone) page.version = "";
    }
  }
  luffy.attempt = attempt;

  async function look() {
    const state = await get("/api/state", { have: page.version });
    if (state.version === page.version) return refresh();
    page.version = state.version;
    page.state = state;
    const empty = showWaiting();
    say([...state.remarks, ...(empty ? [] : state.waiting.map((folder) => `${folder}: no step yet`))]);
    if (empty) at("facts").textContent = "waiting for the first step";
    else facts();
    showMethods();
    showMetrics();
    page.stale = { curves: true, differences: true };
    await Promise.all([refresh(), luffy.browser.news(state, page.tab === "samples")]);
  }

  async function poll() {
    if (!document.hidden) await attempt(look);
    setTimeout(poll, POLL_MS);
  }

  function open(tab, focus) {
    page.tab = tab;
    document.querySelectorAll('[role="tab"]').forEach((button) => {
      const here = button.dataset.tab === tab;
      button.setAttribute("aria-selected", String(here));
      button.tabIndex = here ? 0 : -1;
      if (here && focus) button.focus();
      at(button.dataset.tab).hidden = !here;
    });
    document.title = `luffy view: ${tab}`;
    luffy.browser.remember(tab);
    if (!page.state) return;
    attempt(async () => {
      await refresh();
      if (tab === "samples") await luffy.browser.news(page.state, true);
    });
  }

  document.querySelectorAll('[role="tab"]').forEach((button, i, all) => {
    button.addEventListener("click", () => open(button.dataset.tab));
    button.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) open(all[(i + move + all.length) % all.length].dataset.tab, true);
    });
  });
  at("smoothing").addEventListener("input", () => { at("smoothing-value").textContent = at("smoothing").value; outdated(); });
  at("by").addEventListener("change", outdated);
  at("add-chart").addEventListener("change", () => { page.added.push(at("add-chart").value); showMetrics(); outdated(); });
  at("clear-charts").addEventListener("click", () => { page.added = []; showMetrics(); outdated(); });
  at("show-keys").addEventListener("click", () => at("keys").showModal());
  at("hide-keys").addEventListener("click", () => at("keys").close());
  luffy.theme(at("theme"));
  luffy.colours(at("samples"));

  const keys = {
    c: () => open("curves"), s: () => open("samples"), d: () => open("differences"),
    t: () => at("theme").click(), "?": () => at("keys").showModal(),
    "/": () => { open("samples"); luffy.browser.search(); },
    j: () => luffy.browser.move(1), k: () => luffy.browser.move(-1),
    "[": () => luffy.browser.moveStep(-1), "]": () => luffy.browser.moveStep(1),
    1: () => luffy.browser.colour(0), 2: () => luffy.browser.colour(1), 3: () => luffy.browser.colour(2),
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input:not([type=range], [type=checkbox]), select, textarea, dialog");
    if (event.key === "Escape" && event.target.closest?.("#filters")) {
      event.preventDefault(); // which would empty the search
      at("list").focus();
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  document.addEventListener("visibilitychange", () => { if (!document.hidden) attempt(look); });
  window.addEventListener("hashchange", () => open(luffy.browser.recall()));
  open(luffy.browser.recall());
  poll();
})();
