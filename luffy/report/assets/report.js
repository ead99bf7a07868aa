"use strict";
// Adds to a page that is complete without it: a read-out on the charts, a choice of samples, light and dark.
(() => {
  document.querySelectorAll(".tools").forEach((tools) => { tools.hidden = false; });
  luffy.theme(document.getElementById("theme"));
  document.querySelectorAll("figure").forEach(luffy.readout);

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
  const first = groups.find((group) => group.dataset.teacher === "1") || groups[0]; // a guided group, not SFT
  method.value = first.dataset.method;
  step.value = first.dataset.step;
  method.addEventListener("change", pick);
  step.addEventListener("change", pick);
  pick();
  luffy.colours(document.getElementById("samples"));
})();
