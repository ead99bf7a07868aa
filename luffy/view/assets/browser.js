"use strict";
// The samples: a list of which only the visible rows exist, and the group of the chosen one beside it.
luffy.browser = (() => {
  const ROW = 52; // pixels, as in the style sheet
  const SPARE = 6; // rows drawn above and below what is seen
  const at = (id) => document.getElementById(id);
  const form = at("filters"), list = at("list"), rows = at("rows"), slider = at("at-step");
  const view = { pages: new Map(), total: 0, size: 200, place: -1, shown: -1, steps: [], known: "", state: null, wanted: null };
  const field = (name) => form.elements.namedItem(name);

  // ---- what is asked for

  function filter() {
    const pairs = [...new FormData(form)].filter(([, value]) => value !== "");
    return pairs.map(([name, value]) => [name, name === "search" ? value.slice(0, 1000) : value]);
  }
  const source = () => [["run", field("run").value], ["file", field("file").value]];

  // Answers can overtake each other; only the one to the latest question counts.
  let question = 0;
  async function reload(keep) {
    const mine = ++question;
    const first = keep ? Math.floor(list.scrollTop / ROW / view.size) * view.size : 0; // what is in sight stays so
    const page = await luffy.get("/api/samples", [...filter(), ["start", first], ["near", keep ? view.shown : -1]]);
    if (mine !== question) return true;
    view.pages = new Map([[page.start / page.page, page.entries]]);
    view.total = page.total;
    view.size = page.page;
    view.place = page.place;
    showSteps(page.steps);
    at("count").textContent = (page.total === page.of ? "" : `${page.total.toLocaleString("en")} of `)
      + `${page.of.toLocaleString("en")} samples${page.complete ? "" : ", reading on…"}`;
    rows.style.height = `${view.total * ROW}px`;
    if (!keep) list.scrollTop = 0;
    render();
    if (!keep && view.total) await select(0);
    if (!view.total) clear(page.of ? "No sample passes these filters." : "No samples recorded here.");
    if (!page.complete) setTimeout(() => { if (mine === question) luffy.attempt(() => reload(view.shown >= 0)); }, 50);
    return page.complete;
  }

  async function fetchPage(number) {
    if (view.pages.has(number)) return;
    view.pages.set(number, null); // asked for
    const mine = question;
    const page = await luffy.get("/api/samples", [...filter(), ["start", number * view.size]]);
    if (mine !== question) return;
    view.pages.set(number, page.entries);
    render();
  }

  function entry(place) {
    const page = view.pages.get(Math.floor(place / view.size));
    return page ? page[place % view.size] : undefined;
  }

  // ---- the list

  function render() {
    const first = Math.max(Math.floor(list.scrollTop / ROW) - SPARE, 0);
    const last = Math.min(first + Math.ceil(list.clientHeight / ROW) + 2 * SPARE, view.total);
    const drawn = [];
    for (let place = first; place < last; place += 1) {
      const known = entry(place);
      if (known) drawn.push(row(known, place));
      else luffy.attempt(() => fetchPage(Math.floor(place / view.size)));
    }
    rows.replaceChildren(...drawn);
    list.setAttribute("aria-activedescendant", view.place >= 0 ? `row-${view.place}` : "");
  }

  function span(parent, name, text) {
    const part = document.createElement("span");
    part.className = name;
    part.textContent = text;
    parent.append(part);
    return part;
  }

  function row(known, place) {
    const item = document.createElement("div");
    item.id = `row-${place}`;
    item.className = "row";
    item.setAttribute("role", "option");
    item.setAttribute("aria-selected", String(place === view.place));
    item.setAttribute("aria-setsize", String(view.total));
    item.setAttribute("aria-posinset", String(place + 1));
    item.style.transform = `translateY(${place * ROW}px)`;
    const top = document.createElement("div");
    if (known.reward === null) span(top, "mark", "·");
    else span(top, known.solved ? "mark good" : "mark bad", known.solved ? "✓" : "✗").title = `reward ${known.reward}`;
    span(top, "problem", known.problem).dir = "auto";
    if (known.teacher) span(top, "tag teacher", "T").title = `${known.teacher} teacher tokens`;
    if (known.override) span(top, "tag override", "O").title = `${known.override} tokens by the second model`;
    if (known.truncated) span(top, "tag bad", "cut").title = "truncated";
    if (known.turns > 1) span(top, "tag reply", `${known.turns}↔`).title = `${known.turns} turns${known.calls ? `, ${known.calls} calls` : ""}`;
    span(top, "sub", `step ${known.step} · #${known.sample} · ${known.length.toLocaleString("en")} tok`);
    item.append(top);
    span(item, "ends", known.ends || "(empty)").dir = "auto";
    item.addEventListener("click", () => luffy.attempt(() => select(place)));
    return item;
  }

  async function select(place) {
    view.place = Math.min(Math.max(place, 0), view.total - 1);
    const top = view.place * ROW, bottom = top + ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
    await fetchPage(Math.floor(view.place / view.size));
    render();
    const known = entry(view.place);
    if (known) await show(known.at);
  }

  // ---- the group

  function clear(text) {
    view.shown = -1;
    at("slider").hidden = true;
    at("group").replaceChildren(Object.assign(document.createElement("p"), { className: "note", textContent: text }));
  }

  let groupQuestion = 0;
  async function show(number) {
    const mine = ++groupQuestion;
    const group = await luffy.get("/api/group", [...source(), ["at", number]]);
    if (mine !== groupQuestion) return;
    view.shown = number;
    view.steps = group.steps;
    const here = group.steps.findIndex(([step]) => step === group.step);
    at("slider").hidden = false;
    slider.max = String(group.steps.length - 1);
    slider.value = String(here);
    slider.disabled = group.steps.length < 2;
    slider.setAttribute("aria-valuetext", `step ${group.step}`);
    at("at-step-value").textContent = group.steps.length < 2 ? `${group.step}, the only record of this problem`
      : `${group.step} (${here + 1} of ${group.steps.length})`;
    at("group").innerHTML = group.html;
    at("group").querySelectorAll(".sample").forEach((card, i) => dress(card, group.numbers[i]));
    remember("samples");
  }

  // A megabyte laid out at once holds up the page; what is not in sight need not be laid out.
  const PIECE = 20000;
  function pieces(text) {
    const out = [];
    for (let from = 0; from < text.length;) {
      const line = text.lastIndexOf("\n", from + PIECE);
      const to = line > from && from + PIECE < text.length ? line + 1 : from + PIECE;
      const piece = document.createElement("div");
      piece.className = "piece";
      piece.textContent = text.slice(from, to);
      out.push(piece);
      from = to;
    }
    return out;
  }

  function dress(card, number) {
    card.classList.toggle("chosen", number === view.shown);
    const response = card.querySelector(".response");
    const gap = response.querySelector(".gap");
    if (!gap && !response.textContent.endsWith("…")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Whole response as text";
    button.addEventListener("click", () => luffy.attempt(async () => {
      const whole = await luffy.get("/api/text", [...source(), ["at", number]]);
      response.replaceChildren(...pieces(whole.text));
      button.remove();
    }));
    card.append(button);
  }

  // ---- what the page tells

  function showSteps(steps) {
    const select = field("step"), chosen = select.value;
    if (select.options.length === steps.length + 1 && String(steps.at(-1) ?? "") === select.options[select.options.length - 1].value) return;
    select.replaceChildren(new Option("all", ""), ...steps.map((step) => new Option(step, step)));
    select.value = steps.map(String).includes(chosen) ? chosen : "";
  }

  function showRuns(state) {
    const runs = state.methods.flatMap((method) => method.runs.map((run) => ({ ...run, label: method.label })));
    const select = field("run"), chosen = view.wanted?.run || select.value;
    const options = runs.map((run) => new Option(`${run.label}, seed ${run.seed ?? "?"}`, run.id));
    select.replaceChildren(...options);
    const sampled = (run) => run.kind === "train" ? 1 : 0; // traces of SFT are no samples
    const newest = runs.filter((run) => run.files.length).sort((a, b) => sampled(b) - sampled(a) || b.time - a.time)[0];
    const best = runs.find((run) => run.id === chosen) || newest || runs[0];
    if (!best) return false;
    select.value = best.id;
    const has = (file) => best.files.includes(file);
    [...field("file").options].forEach((option) => { option.disabled = !has(option.value); });
    if (!has(field("file").value)) field("file").value = best.files[0] || "train";
    return true;
  }

  async function news(state, visible) {
    if (!visible) return;
    const fresh = !view.known;
    if (view.known === state.version) return;
    view.state = state;
    if (!showRuns(state)) { clear("No run has made a step yet."); return; }
    view.known = state.version;
    const wanted = view.wanted;
    view.wanted = null;
    if (fresh && wanted?.at !== undefined) {
      if ([...field("file").options].some((o) => o.value === wanted.file && !o.disabled)) field("file").value = wanted.file;
      view.shown = wanted.at;
      while (!await reload(true) && view.place < 0); // a long file is read in parts
      if (view.place >= 0) { await select(view.place); return; }
    }
    await reload(!fresh && view.shown >= 0);
  }

  function remember(tab) {
    const parts = [tab];
    if (tab === "samples" && view.shown >= 0) parts.push(field("run").value, field("file").value, String(view.shown));
    history.replaceState(null, "", `#/${parts.join("/")}`); // with a slash it is no element's name to scroll to
  }

  function recall() {
    const [tab, run, file, number] = location.hash.replace(/^#\/?/, "").split("/"); // #samples, typed by hand, too
    if (run && /^\d+$/.test(number || "")) {
      view.wanted = { run, file, at: Number(number) };
      view.known = ""; // an address entered on an open page is like one it was opened with
    }
    return ["curves", "samples", "differences"].includes(tab) ? tab : "curves";
  }

  let typing;
  const changed = () => luffy.attempt(async () => { view.place = -1; await reload(false); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", (event) => {
    if (event.target.name === "search") return; // heard as it was typed; leaving the field is no new question
    if (["run", "file"].includes(event.target.name)) field("step").value = "";
    if (event.target.name === "run") showRuns(view.state);
    changed();
  });
  field("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(changed, 150); });
  list.addEventListener("scroll", () => requestAnimationFrame(render), { passive: true });
  new ResizeObserver(render).observe(list);
  list.addEventListener("keydown", (event) => {
    const page = Math.max(Math.floor(list.clientHeight / ROW) - 1, 1);
    const target = { ArrowDown: view.place + 1, ArrowUp: view.place - 1, PageDown: view.place + page,
      PageUp: view.place - page, Home: 0, End: view.total - 1 }[event.key];
    if (target === undefined || !view.total) return;
    event.preventDefault();
    luffy.attempt(() => select(target));
  });
  slider.addEventListener("input", () => luffy.attempt(() => show(view.steps[Number(slider.value)][1])));

  return {
    news, remember, recall,
    move: (by) => { if (view.total) luffy.attempt(() => select(view.place + by)); },
    moveStep: (by) => {
      const next = view.steps[Number(slider.value) + by];
      if (next) luffy.attempt(() => show(next[1]));
    },
    search: () => field("search").focus(),
    colour: (number) => {
      const choice = document.querySelector("#samples select.colour");
      choice.selectedIndex = number;
      choice.dispatchEvent(new Event("change"));
    },
  };
})();
