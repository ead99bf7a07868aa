"use strict";
// Adds to a page that is complete without it: a read-out on the charts, a choice of samples, light and dark.
(() => {
  const root = document.documentElement;
  document.querySelectorAll(".tools").forEach((tools) => { tools.hidden = false; });

  const theme = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const nameTheme = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; nameTheme(); });
  nameTheme();

  const show = (value) => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));

  // the index of the value in sorted `xs` that is nearest to `x`
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  function row(parent, line, at) {
    const entry = document.createElement("div");
    const dot = document.createElement("i");
    dot.style.background = `var(--m${line.style})`;
    entry.append(dot, `${line.label}  ${show(line.y[at])}`);
    if (line.low) {
      const range = document.createElement("span");
      range.textContent = `  ${show(line.low[at])} to ${show(line.high[at])}`;
      entry.append(range);
    }
    parent.append(entry);
  }

  function readout(figure) {
    const chart = figure.querySelector(".chart");
    const lines = JSON.parse(figure.querySelector("script").textContent);
    const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    if (!steps.length) return;
    const [left, right, last] = chart.dataset.plot.split(" ").map(Number);
    const cross = chart.querySelector(".cross");
    const box = document.createElement("div");
    box.className = "readout";
    box.hidden = true;
    figure.append(box);
    let current = steps.length - 1;

    function point(at) {
      current = Math.min(Math.max(at, 0), steps.length - 1);
      const step = steps[current], x = left + (right - left) * step / last;
      cross.replaceChildren();
      const rule = document.createElementNS(chart.namespaceURI, "path");
      rule.setAttribute("d", `M${x} 10V190`);
      cross.append(rule);
      box.replaceChildren();
      const head = document.createElement("b");
      head.textContent = `step ${step}`;
      box.append(head);
      const reach = Math.max(last / 100, 0.5);
      lines.forEach((line) => {
        const i = nearest(line.x, step);
        if (Math.abs(line.x[i] - step) <= reach) row(box, line, i);
      });
      box.hidden = false;
    }
    function leave() { box.hidden = true; cross.replaceChildren(); }

    chart.addEventListener("pointermove", (event) => {
      const scale = chart.clientWidth / chart.viewBox.baseVal.width;
      const x = (event.clientX - chart.getBoundingClientRect().left) / scale;
      point(nearest(steps, (x - left) / (right - left) * last));
    });
    chart.addEventListener("pointerleave", leave);
    chart.addEventListener("blur", leave);
    chart.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") leave();
      if (!move) return;
      event.preventDefault();
      point(box.hidden ? current : current + move);
    });
  }
  document.querySelectorAll("figure").forEach(readout);

  const groups = [...document.querySelectorAll(".group")];
  if (!groups.length) return;
  const method = document.getElementById("pick-method"), step = document.getElementById("pick-step");
  const option = (select, value, text) => select.append(new Option(text, value));
  const distinct = (name) => [...new Set(groups.map((group) => group.dataset[name]))];
  option(method, "", "all");
  distinct("method").forEach((value) => {
    const named = groups.find((group) => group.dataset.method === value);
    option(method, value, named.dataset.label);
  });
  option(step, "", "all");
  distinct("step").sort((a, b) => a - b).forEach((value) => option(step, value, value));
  const pick = () => groups.forEach((group) => {
    group.hidden = (method.value && group.dataset.method !== method.value) || (step.value && group.dataset.step !== step.value);
  });
  const first = groups.find((group) => group.dataset.teacher === "1") || groups[0];
  method.value = first.dataset.method;
  step.value = first.dataset.step;
  method.addEventListener("change", pick);
  step.addEventListener("change", pick);
  pick();
  const shade = document.getElementById("shade"), samples = document.getElementById("samples");
  shade.addEventListener("change", () => samples.classList.toggle("shade", shade.checked));
})();
