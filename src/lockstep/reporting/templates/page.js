"use strict";
// Sorting, filters, the switch of the x axis, copying, values under the pointer, enlarged images. Without it the page is whole but still.
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

for (const table of all("table.sortable")) all("th", table).forEach((th, column) => {
  th.querySelector("button").onclick = () => {
    const falls = th.getAttribute("aria-sort") === "descending" || (th.classList.contains("text") && !th.hasAttribute("aria-sort"));
    all("th", table).forEach(other => other.removeAttribute("aria-sort"));
    th.setAttribute("aria-sort", falls ? "ascending" : "descending");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const compare = (a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");  // what is absent comes last
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
if (everyS) {  // the page of a run that trains is written again and again; the last one has no such attribute
  switchUnit(window.name || "x");  // a name outlives the reload
  setInterval(() => {
    const age = Date.now() / 1000 - writtenS;
    if (age > 60 + 5 * everyS) document.getElementById("news").textContent = `no news for ${Math.round(age / 60)} min: the run may have died`;
    window.name = document.body.dataset.unit;
    location.reload();
  }, 1000 * everyS);
}

const filters = all("select[data-filters]");
const passes = (figure, select) => !select.value || figure.dataset[select.dataset.filters]?.split(", ").includes(select.value);
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
for (const chart of all(".chart")) {
  const svg = chart.querySelector("svg"), tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  const lines = svg ? all("polyline", svg).map(line => ({
    line, name: line.dataset.name,
    values: line.dataset.values.split(" ").map(pair => pair.split(",").map(Number)),
    places: line.getAttribute("points").split(" ").map(pair => pair.split(",").map(Number)),
  })) : [];
  if (!lines.length) continue;
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
}

for (const select of all("select[data-shows]")) {
  const show = () => all(`[data-shown-by="${select.dataset.shows}"]`).forEach(each => each.hidden = each.dataset.key !== select.value);
  select.onchange = show; show();
}
for (const row of all("tr[data-run]")) {
  const mine = () => all("polyline").filter(line => line.dataset.name === row.dataset.run);
  row.onpointerenter = () => mine().forEach(line => { line.classList.add("on"); line.ownerSVGElement.classList.add("one"); line.parentNode.append(line); });
  row.onpointerleave = () => mine().forEach(line => { line.classList.remove("on"); line.ownerSVGElement.classList.remove("one"); });
}
