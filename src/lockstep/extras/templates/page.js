"use strict";
// Sorting, filters, the switch of the x axis, copying, values under the pointer, enlarged images. Without it, the page is complete but static.
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

for (const table of all("table.sortable")) all("th", table).forEach(th => {
  th.querySelector("button").onclick = () => {
    const falls = th.getAttribute("aria-sort") === "descending" || (th.classList.contains("text") && !th.hasAttribute("aria-sort"));
    all("th", table).forEach(other => other.removeAttribute("aria-sort"));
    th.setAttribute("aria-sort", falls ? "ascending" : "descending");
    const value = row => row.cells[th.cellIndex].dataset.value ?? row.cells[th.cellIndex].textContent.trim();
    const compare = (a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");  // missing values come last
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return falls ? order : -order;
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(compare));
  };
});

const switchUnit = unit => {
  document.body.dataset.unit = unit;
  all("[data-unit-to]").forEach(each => each.setAttribute("aria-pressed", each.dataset.unitTo === unit));
};
for (const button of all("[data-unit-to]")) button.onclick = () => switchUnit(button.dataset.unitTo);

const dialog = document.querySelector("dialog"), { everyS, writtenS } = document.body.dataset;
if (everyS) {  // while a run trains, its page is rewritten regularly; the final page lacks this attribute
  switchUnit(window.name || "x");  // the name survives the reload
  const age = Date.now() / 1000 - writtenS;
  if (age > 60 + 5 * everyS) document.getElementById("news").textContent = `last updated ${Math.round(age / 60)} min ago: the run may have died`;
  setTimeout(() => { window.name = document.body.dataset.unit; location.reload(); }, 1000 * everyS);
}

const filters = all("select[data-filters]");
const passes = (figure, select) => !select.value || figure.dataset[select.dataset.filters]?.split("\n").includes(select.value);
for (const select of filters) select.onchange = () => all(".gallery figure").forEach(figure => figure.hidden = !filters.every(each => passes(figure, each)));

let zoomed;
const zoom = button => {
  zoomed = button;
  dialog.replaceChildren(...[button.firstElementChild, button.closest("figure").querySelector("figcaption")].map(each => each.cloneNode(true)));
  if (!dialog.open) dialog.showModal();
};
for (const button of all("button.zoom")) button.onclick = () => zoom(button);
if (dialog) dialog.onclick = () => dialog.close();
if (dialog) dialog.onkeydown = event => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], shown = all("button.zoom").filter(each => each.offsetParent);
  if (step) zoom(shown[(shown.indexOf(zoomed) + step + shown.length) % shown.length]);
};

for (const button of all("button.copy")) button.onclick = async () => {
  const text = button.parentElement.querySelector("code").textContent;
  try { await navigator.clipboard.writeText(text); }
  catch {  // a page opened as a file may not use the clipboard
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
  }
  button.textContent = "Copied"; setTimeout(() => button.textContent = "Copy", 1500);
};

const short = value => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
const pointed = chart => {  // values under the pointer
  const svg = chart.querySelector("svg"), tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  const lines = svg ? all(".line", svg).map(line => ({
    line, name: line.dataset.name,
    values: line.dataset.values.split(" ").map(pair => pair.split(",").map(Number)),
    places: line.getAttribute("d").match(/[\d.-]+,[\d.-]+/g).map(pair => pair.split(",").map(Number)),
  })) : [];
  if (!lines.length) return;
  chart.append(tip);
  const guide = document.createElementNS("http://www.w3.org/2000/svg", "line");
  guide.setAttribute("class", "guide"); svg.prepend(guide); guide.style.display = "none";
  const leave = () => { tip.hidden = true; guide.style.display = "none"; lines.forEach(each => each.line.classList.remove("on")); svg.classList.remove("one"); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const near = lines.map(each => {
      let at = 0;
      each.places.forEach((place, i) => { if (Math.abs(place[0] - x) < Math.abs(each.places[at][0] - x)) at = i; });
      return { ...each, at, away: Math.abs(each.places[at][0] - x), high: Math.abs(each.places[at][1] - y) };
    });
    const best = near.reduce((a, b) => b.away < a.away ? b : a);
    const one = lines.length > 8;  // too many to list: the curve under the pointer
    const shown = one ? [near.reduce((a, b) => b.high + 4 * b.away < a.high + 4 * a.away ? b : a)] : near.filter(each => each.away <= best.away + 6);
    if (one) { leave(); svg.classList.add("one"); shown[0].line.classList.add("on"); }
    const first = one ? shown[0] : best, value = first.values[first.at][0], per = Number(svg.dataset.per);
    const title = per && document.body.dataset.unit === "per" ? `${short(value * per)} ${svg.dataset.perX}` : `${svg.dataset.x} ${short(value)}`;
    tip.textContent = [title, ...shown.map(each => `${each.name}  ${svg.dataset.percent === undefined ? short(each.values[each.at][1]) : `${(100 * each.values[each.at][1]).toFixed(2)}%`}`)].join("\n");
    const at = first.places[first.at][0];
    for (const [name, place] of [["x1", at], ["x2", at], ["y1", 14], ["y2", 190]]) guide.setAttribute(name, place);
    guide.style.display = ""; tip.hidden = false;
    const px = at / scale;
    tip.style.left = `${Math.max(0, Math.min(px + 12, chart.clientWidth - tip.offsetWidth))}px`;
    if (px + 12 + tip.offsetWidth > chart.clientWidth) tip.style.left = `${Math.max(0, px - 12 - tip.offsetWidth)}px`;
    tip.style.top = `${chart.clientHeight - box.height + 14 / scale}px`;
  });
};
all(".chart").forEach(pointed);

// Two runs of a section side by side: metrics and settings that differ, curves, and the difference of their confusion matrices.
const element = (tag, attributes, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const table = (css, head, ...rows) => element("table", { class: css }, element("thead", {}, head), element("tbody", {}, ...rows));
const region = (label, child) => element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, child);
const pairRows = (title, names, a, b) => {
  const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].filter(key => a[key] !== b[key]);
  const row = key => element("tr", {}, element("th", { scope: "row" }, key), element("td", {}, a[key] ?? ""), element("td", {}, b[key] ?? ""));
  const head = element("tr", {}, element("td", {}), ...names.map(name => element("th", { scope: "col" }, name)));
  return element("div", {}, element("h3", {}, title), keys.length ? region(title, table("plain", head, ...keys.map(row))) : element("p", { class: "note" }, "No difference."));
};
const confusionRows = (names, a, b) => {
  const changes = a.values.map((row, i) => row.map((count, j) => b.values[i][j] - count)), most = Math.max(1, ...changes.flat().map(Math.abs));
  const cell = (change, i, j) => change ? element("td", { class: (change > 0) === (i === j) ? "right" : "wrong", style: `--v:${Math.sqrt(Math.abs(change) / most)}` }, (change > 0 ? "+" : "−") + Math.abs(change)) : element("td", {});
  const head = element("tr", {}, element("td", {}), ...a.names.map(name => element("th", { scope: "col" }, name)));
  const rows = changes.map((row, i) => element("tr", {}, element("th", { scope: "row" }, a.names[i]), ...row.map((change, j) => cell(change, i, j))));
  return element("div", {}, element("h3", {}, "Confusion matrix"), element("p", { class: "note" }, `Counts of ${names[1]} minus those of ${names[0]}: blue is better, red is worse.`), region("difference of the confusion matrices", table("matrix", head, ...rows)));
};
const curvesOf = (figure, names) => {
  const copy = figure.cloneNode(true);
  all(".tip, .guide", copy).forEach(each => each.remove());
  all("[data-name]", copy).forEach(each => names.includes(each.dataset.name) || each.remove());
  return copy;
};
for (const section of all("section.data")) {
  const boxes = all("input[name=compare]", section), place = section.querySelector(".compare");
  if (!place) { boxes.forEach(box => box.remove()); continue; }
  const runs = JSON.parse(section.querySelector("script").textContent);
  let chosen = [];
  for (const box of boxes) box.onchange = () => {
    chosen = box.checked ? [...chosen, box.value].slice(-2) : chosen.filter(name => name !== box.value);
    boxes.forEach(each => each.checked = chosen.includes(each.value));
    place.replaceChildren();
    if (chosen.length < 2) return;
    const [a, b] = chosen.map(name => runs[name]);
    const parts = ["metrics", "settings"].map(part => pairRows(part[0].toUpperCase() + part.slice(1), chosen, a[part], b[part]));
    if (a.confusion && b.confusion && String(a.confusion.names) === String(b.confusion.names)) parts.push(confusionRows(chosen, a.confusion, b.confusion));
    place.append(element("h3", {}, `${chosen[0]} and ${chosen[1]}`), element("div", { class: "grid" }, ...parts, ...all("figure.chart", section).map(figure => curvesOf(figure, chosen))));
    all(".chart", place).forEach(pointed);
  };
}

for (const row of all("tr[data-run]")) {
  const mine = () => all(".line", row.closest("section")).filter(line => line.dataset.name === row.dataset.run);
  row.onpointerenter = () => mine().forEach(line => { line.classList.add("on"); line.ownerSVGElement.classList.add("one"); line.parentNode.append(line); });
  row.onpointerleave = () => mine().forEach(line => { line.classList.remove("on"); line.ownerSVGElement.classList.remove("one"); });
}
