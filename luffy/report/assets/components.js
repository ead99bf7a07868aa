"use strict";
// What the report and the live page share: light and dark, the read-out on charts, the colours of tokens.
const luffy = (() => {
  const root = document.documentElement;

  function theme(button) {
    const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
    button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
    name();
  }

  // The choice is an attribute of the section: the style sheet does the rest, without touching a token.
  function colours(section) {
    const choice = section.querySelector("select.colour");
    const pick = () => { section.dataset.colour = choice.value; };
    choice.addEventListener("change", pick);
    pick();
  }

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
    const data = figure.querySelector("script");
    if (!data) return;
    const lines = JSON.parse(data.textContent);
    const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    if (!steps.length) return;
    const [left, right, last] = chart.dataset.plot.split(" ").map(Number);
    const axis = chart.dataset.axis;
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
      head.textContent = axis === "step" ? `step ${step}` : `${Math.round(step).toLocaleString("en")} ${axis}`;
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

  return { theme, colours, readout };
})();
