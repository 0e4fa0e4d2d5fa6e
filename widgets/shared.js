// What all widgets share: labelled controls, SVG charts, a table, and the theme. Plain ES module, no dependency.
//
// A widget is one function, view(record, state) -> {says, panels, table, notes}; its Python twin has the same name and
// the same result (widgets/view.py describes it), which the browser tests compare. This file alone touches the page.

const SVG = "http://www.w3.org/2000/svg";

// Okabe and Ito's colour-blind-safe palette, lighter on dark pages. Jupyter's variables first, the system's otherwise.
const CSS = `
.lsw { --blue: #0072b2; --orange: #d55e00; --green: #00805f; --purple: #a8568a; --sky: #2f8fc4; --yellow: #9a7d00; --grey: #767676;
  color: var(--jp-content-font-color1, CanvasText); font: 14px/1.45 var(--jp-content-font-family, system-ui, sans-serif);
  max-width: 1100px; container-type: inline-size; padding: 4px 2px; }
@supports (color: light-dark(red, blue)) { .lsw {
  --blue: light-dark(#0072b2, #56b4e9); --orange: light-dark(#d55e00, #ff8f3e); --green: light-dark(#00805f, #2fc79c);
  --purple: light-dark(#a8568a, #e08fc2); --sky: light-dark(#2f8fc4, #8ed0f5); --yellow: light-dark(#9a7d00, #f0e442);
  --grey: light-dark(#6f6f6f, #a8a8a8); } }
.lsw * { box-sizing: border-box; }
.lsw-title { font-weight: 600; font-size: 15px; margin: 0 0 6px; }
.lsw-controls { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(230px, 100%), 1fr)); gap: 6px 22px; margin: 0 0 8px; }
.lsw-control { display: grid; grid-template-columns: 1fr auto; align-items: baseline; gap: 0 8px; min-width: 0; }
@container (min-width: 520px) { .lsw-wide { grid-column: span 2; } }
.lsw-control output { font-variant-numeric: tabular-nums; font-weight: 600; text-align: right; }
.lsw-control input, .lsw-control select { grid-column: 1 / -1; width: 100%; margin: 2px 0; accent-color: var(--blue); font: inherit; }
.lsw-control select { color: inherit; background: var(--jp-layout-color1, Canvas); border: 1px solid var(--grey); border-radius: 3px; padding: 3px 4px; min-width: 0; }
.lsw-control select option { color: CanvasText; background: Canvas; }
.lsw :is(input, select, summary):focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
.lsw-says { margin: 4px 0 8px; max-width: 90ch; }
.lsw-panels { display: grid; gap: 12px 20px; grid-template-columns: minmax(0, 1fr); }
@container (min-width: 760px) { .lsw-panels.lsw-two { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
.lsw figure { margin: 0; min-width: 0; }
.lsw figcaption { font-weight: 600; font-size: 13px; }
.lsw svg { display: block; width: 100%; overflow: visible; }
.lsw svg text { fill: currentColor; font-size: 12px; }
.lsw-legend { display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; padding: 0; margin: 2px 0 0; font-size: 12.5px; }
.lsw-legend li { display: flex; align-items: center; gap: 6px; margin: 0; }
.lsw-legend svg { width: 34px; height: 12px; flex: none; }
.lsw-origin { opacity: 0.75; font-style: italic; }
.lsw-scroll { overflow-x: auto; margin-top: 10px; }
.lsw table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; color: inherit; margin: 0; }
.lsw caption { text-align: left; font-weight: 600; padding: 2px 0; color: inherit; }
.lsw table :is(th, td) { text-align: left !important; padding: 3px 10px 3px 0; vertical-align: top; white-space: nowrap; border-bottom: 1px solid color-mix(in srgb, currentColor 18%, transparent); color: inherit; background: none; }
.lsw-notes { font-size: 12.5px; opacity: 0.85; margin: 8px 0 0; padding-left: 18px; max-width: 100ch; }
`;

// ------------------------------------------------------------------------------------------------ numbers

/** `digits` significant digits with thousands separators; widgets/view.py has the same function. */
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return grouped(value.toFixed(0));
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(digits - 1);
  return grouped(value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size)))));
}

function grouped(text) {
  const [whole, rest] = text.split(".");
  const spaced = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return rest === undefined ? spaced : `${spaced}.${rest}`;
}

/** All digits that a published number has. */
export function exact(value) {
  return grouped(String(value));
}

/** The rows whose fields equal those of `wanted`. */
export function select(rows, wanted) {
  return rows.filter((row) => Object.entries(wanted).every(([name, value]) => row[name] === value));
}

/** Distinct values in order of appearance. */
export function distinct(values) {
  return [...new Set(values)];
}

const FRAGMENTATION = 1.1; // of workbench.planner

/** The planner's verdict on one of its cells on a card; `verdict` in widgets/plan_cells.py. */
export function verdict(cell, card) {
  if (cell.peak_bytes + card.reserve_bytes > card.memory_bytes) return "no";
  const fragmentation = card.reserve_bytes ? FRAGMENTATION : 1;
  const high = cell.loaded_bytes + (cell.peak_high - cell.loaded_bytes) * fragmentation;
  return high + card.reserve_bytes <= card.memory_bytes ? "fits" : "probe";
}

// ------------------------------------------------------------------------------------------------ hosts

/** An anywidget from a view function. */
export function widget(view) {
  return { render: ({ model, el }) => mount(model, el, view) };
}

/** The same in a page without a kernel: `state` holds what the model's traits would. */
export function show(host, state, view) {
  const listeners = {};
  const model = {
    get: (name) => state[name],
    set: (name, value) => {
      state[name] = value;
      (listeners[`change:${name}`] ?? []).forEach((listener) => listener());
    },
    save_changes: () => {},
    on: (event, listener) => (listeners[event] ??= []).push(listener),
    off: () => {},
  };
  host.replaceChildren();
  return mount(model, host, view);
}

function mount(model, el, view) {
  const root = html("section", { class: "lsw", "aria-label": model.get("_title") });
  const parts = {
    controls: html("div", { class: "lsw-controls" }),
    says: html("p", { class: "lsw-says", "aria-live": "polite" }),
    panels: html("div", { class: "lsw-panels" }),
    table: html("div", { class: "lsw-scroll" }),
    notes: html("ul", { class: "lsw-notes" }),
  };
  root.append(html("style", {}, CSS), html("p", { class: "lsw-title" }, model.get("_title")), ...Object.values(parts));
  el.append(root);

  let current = null;
  const state = () => Object.fromEntries(model.get("_controls").map(({ name }) => [name, model.get(name)]));
  const redraw = () => {
    current = view(model.get("record"), state());
    root.view = current; // for tests: what is shown, as data
    drawWords(parts, current);
    drawPanels(parts.panels, current.panels);
  };
  let updates = [];
  const rebuild = () => {
    const built = model.get("_controls").map((control) => controlFor(control, model));
    parts.controls.replaceChildren(...built.map(({ element }) => element));
    updates = built;
  };
  const refresh = () => {
    updates.forEach(({ update }) => update());
    redraw();
  };
  const renew = () => {
    rebuild();
    redraw();
  };
  const names = model.get("_controls").map(({ name }) => `change:${name}`);
  names.forEach((event) => model.on(event, refresh));
  ["change:record", "change:_controls"].forEach((event) => model.on(event, renew));
  renew();

  let width = root.clientWidth;
  const observer = new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    drawPanels(parts.panels, current.panels);
  });
  observer.observe(root);
  return () => {
    observer.disconnect();
    names.forEach((event) => model.off(event, refresh));
    ["change:record", "change:_controls"].forEach((event) => model.off(event, renew));
  };
}

// ------------------------------------------------------------------------------------------------ controls

let counter = 0;

/** A labelled slider over a list of values, or a drop-down list. */
function controlFor({ name, label, kind, values, texts, applies }, model) {
  const id = `lsw-${name}-${(counter += 1)}-${Math.random().toString(36).slice(2, 8)}`;
  const index = () => Math.max(0, values.indexOf(model.get(name)));
  // JupyterLab takes arrow keys from inputs unless the input itself says otherwise; on a wrapper it does not help.
  const shared = { id, name, "data-lm-suppress-shortcuts": "true" };
  const choose = (at) => {
    model.set(name, values[at]);
    model.save_changes();
  };
  // Some choices fix others: their inputs say so.
  const reaches = () => !applies || applies.values.includes(model.get(applies.control));
  const wide = kind === "choice" && Math.max(...texts.map((text) => text.length)) > 34;
  const box = html("div", { class: wide ? "lsw-control lsw-wide" : "lsw-control" }, html("label", { for: id }, label));
  if (kind === "choice") {
    const input = html("select", shared, ...texts.map((text, at) => html("option", { value: at }, text)));
    input.addEventListener("change", () => choose(Number(input.value)));
    box.append(input);
    const update = () => {
      input.value = String(index());
      input.disabled = !reaches();
    };
    update();
    return { element: box, update };
  }
  const input = html("input", { ...shared, type: "range", min: 0, max: values.length - 1, step: 1 });
  const shown = html("output", { for: id });
  input.addEventListener("input", () => choose(Number(input.value)));
  box.append(shown, input);
  const update = () => {
    input.value = String(index());
    input.disabled = !reaches();
    shown.textContent = input.disabled ? applies.otherwise : texts[index()];
    input.setAttribute("aria-valuetext", shown.textContent);
  };
  update();
  return { element: box, update };
}

// ------------------------------------------------------------------------------------------------ words and table

function drawWords(parts, { says, table, notes }) {
  parts.says.textContent = says;
  const head = html("tr", {}, ...table.headings.map((heading) => html("th", { scope: "col" }, heading)));
  const rows = table.rows.map((row) => html("tr", {}, ...row.map((cell) => html("td", {}, cell))));
  parts.table.replaceChildren(
    html("table", {}, html("caption", {}, table.caption), html("thead", {}, head), html("tbody", {}, ...rows)),
  );
  parts.notes.replaceChildren(...notes.map((note) => html("li", {}, note)));
  parts.notes.hidden = notes.length === 0;
}

// ------------------------------------------------------------------------------------------------ charts

const HEIGHT = 260;
const TOP = 20;

function drawPanels(host, panels) {
  host.classList.toggle("lsw-two", panels.length > 1);
  host.replaceChildren();
  panels.forEach((panel) => {
    const figure = html("figure", {}, html("figcaption", {}, panel.title));
    host.append(figure); // first, so that it has a width
    if (panel.series.length === 0) figure.append(html("p", {}, panel.empty));
    else figure.append(chart(panel, Math.max(240, figure.clientWidth)), legend(panel.series));
  });
}

/** One panel as an SVG of the given width. */
function chart({ title, x, y, series, marks }, width) {
  const stacked = stack(series);
  const values = (axis) => [
    ...stacked.flatMap((s) => (axis === "x" ? s.x : [...s.y, ...(s.low ?? []), ...(s.high ?? []), ...(s.base ?? [])])),
    ...marks.filter((mark) => mark.axis === axis).map((mark) => mark.value),
  ];
  const bars = series.some((s) => s.kind === "bars");
  const yTicks = ticks(y.scale, values("y").filter((v) => v !== null), bars || series.some((s) => s.kind === "area"), 5, y.ticks === "whole");
  const left = 14 + 7 * Math.max(...yTicks.shown.map((v) => tick(v).length)) + 16;
  const names = x.scale === "band" ? distinct(values("x")) : [];
  const right = width - 12;
  const lines = x.scale === "band" ? names.map((name) => wrap(name, (right - left) / names.length / 6)) : [];
  const bottom = HEIGHT + TOP;
  const height = bottom + 38 + 14 * Math.max(0, ...lines.map((l) => l.length - 1));
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title}; the table below holds the same numbers` });
  const xTicks = x.scale === "band" ? null : ticks(x.scale, values("x"), false, Math.max(3, Math.floor((right - left) / 90)), x.ticks === "whole");
  const px = x.scale === "band" ? bandScale(names, left, right) : scale(x.scale, xTicks.domain, left, right);
  const py = scale(y.scale, yTicks.domain, bottom, TOP);

  drawAxes(svg, { x, y, px, py, xTicks, yTicks, names, lines, left, right, bottom, width, height });
  const groups = series.filter((s) => s.kind === "bars").length;
  let group = 0;
  stacked.forEach((s) => {
    if (s.kind === "bars") drawBars(svg, s, px, py, bottom, group++, groups, x.stack);
    else if (s.kind === "area") drawArea(svg, s, px, py);
    else drawLine(svg, s, px, py);
  });
  const onX = marks.filter((mark) => mark.axis === "x");
  marks.forEach((mark) => drawMark(svg, mark, px, py, left, right, bottom, onX.indexOf(mark)));
  return svg;
}

/** Areas, and bars with stack, stand on the sum of those before them. */
function stack(series) {
  const sums = new Map();
  return series.map((s) => {
    if (s.kind !== "area" && !s.stack) return s;
    const base = s.x.map((x) => sums.get(x) ?? 0);
    const top = s.y.map((y, at) => base[at] + y);
    s.x.forEach((x, at) => sums.set(x, top[at]));
    return { ...s, y: top, own: s.y, base };
  });
}

function drawAxes(svg, { x, y, px, py, xTicks, yTicks, names, lines, left, right, bottom, width, height }) {
  yTicks.shown.forEach((value) => {
    svg.append(node("line", { x1: left, x2: right, y1: py(value), y2: py(value), stroke: "currentColor", opacity: 0.15 }));
    svg.append(node("text", { x: left - 6, y: py(value) + 4, "text-anchor": "end" }, tick(value)));
  });
  svg.append(node("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: "currentColor", opacity: 0.6 }));
  if (x.scale === "band") {
    names.forEach((name, at) => {
      const text = node("text", { "text-anchor": "middle", style: px.step < 64 ? "font-size: 10px" : "" });
      lines[at].forEach((line, row) => text.append(node("tspan", { x: px(name), y: bottom + 16 + 14 * row }, line)));
      svg.append(text);
    });
  } else {
    xTicks.shown.forEach((value) => {
      svg.append(node("line", { x1: px(value), x2: px(value), y1: bottom, y2: bottom + 4, stroke: "currentColor", opacity: 0.6 }));
      svg.append(node("text", { x: px(value), y: bottom + 16, "text-anchor": "middle" }, x.ticks === "short" ? short(value) : tick(value)));
    });
  }
  svg.append(node("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, x.label));
  const middle = (TOP + bottom) / 2;
  svg.append(node("text", { x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` }, y.label));
}

function drawLine(svg, s, px, py) {
  const points = s.x.map((x, at) => ({ x: px(x), y: s.y[at] === null ? null : py(s.y[at]), at }));
  if (s.low) {
    const known = points.filter(({ at }) => s.low[at] !== null);
    const edge = (side, list) => list.map(({ x, at }) => `${x},${py(s[side][at])}`).join(" ");
    svg.append(node("polygon", { points: `${edge("high", known)} ${edge("low", [...known].reverse())}`, fill: color(s), opacity: 0.18 }));
  }
  const known = points.filter(({ y }) => y !== null);
  if (s.kind === "line" && known.length > 1) {
    svg.append(node("polyline", { points: known.map(({ x, y }) => `${x},${y}`).join(" "), fill: "none", ...strokeOf(s) }));
  }
  if (s.kind === "points" || s.origin !== "modelled" || known.length === 1) {
    if (known.length > 40) return;
    known.forEach(({ x, y, at }) => {
      const named = Array.isArray(s.texts) ? s.texts[at] : `${s.name}: ${number(s.x[at])}, ${number(s.y[at])} (${s.origin})`;
      svg.append(marker(s, x, y, named));
    });
  }
}

function drawArea(svg, s, px, py) {
  const edge = (values, list) => list.map((at) => `${px(s.x[at])},${py(values[at])}`).join(" ");
  const order = s.x.map((_, at) => at);
  const polygon = node("polygon", { points: `${edge(s.y, order)} ${edge(s.base, [...order].reverse())}`, fill: color(s), opacity: 0.75 });
  polygon.append(node("title", {}, `${s.name} (${s.origin})`));
  svg.append(polygon);
}

function drawBars(svg, s, px, py, bottom, group, groups) {
  const slot = (px.step * 0.76) / (s.stack ? 1 : groups);
  s.x.forEach((x, at) => {
    if (s.y[at] === null) return;
    const from = s.stack ? px(x) - slot / 2 : px(x) - (slot * groups) / 2 + slot * group;
    const base = s.base ? py(s.base[at]) : bottom;
    const bar = node("rect", { x: from + 1, width: Math.max(1, slot - 2), y: py(s.y[at]), height: Math.max(0, base - py(s.y[at])), ...fillOf(svg, s) });
    bar.append(node("title", {}, `${s.name}, ${x}: ${number((s.own ?? s.y)[at])} (${s.origin})`));
    svg.append(bar);
  });
}

function drawMark(svg, { axis, value, label, origin }, px, py, left, right, bottom, row) {
  const at = axis === "x" ? px(value) : py(value);
  const line = axis === "x" ? { x1: at, x2: at, y1: TOP, y2: bottom } : { x1: left, x2: right, y1: at, y2: at };
  svg.append(node("line", { ...line, stroke: "currentColor", "stroke-width": 1.5, "stroke-dasharray": axis === "x" ? "2 3" : "8 3", opacity: 0.8, "data-mark": label }));
  if (axis === "x") {
    const anchor = at < left + 40 ? "start" : at > right - 40 ? "end" : "middle";
    // A second label stands beside its line, lower.
    const beside = at + 7 * label.length < right ? { x: at + 4 } : { x: at - 4, "text-anchor": "end" };
    svg.append(node("text", row > 0 ? { ...beside, y: TOP - 6 + 14 * row } : { x: at, y: TOP - 6, "text-anchor": anchor }, label));
  } else {
    svg.append(node("text", { x: right, y: at - 4, "text-anchor": "end" }, origin ? `${label} (${origin})` : label));
  }
}

function legend(series) {
  const items = distinct(series.map((s) => `${s.name}|${s.origin}`)).map((key) => series.find((s) => `${s.name}|${s.origin}` === key));
  return html(
    "ul",
    { class: "lsw-legend" },
    ...items.map((s) => {
      const swatch = node("svg", { viewBox: "0 0 34 12", "aria-hidden": "true" });
      if (s.kind === "bars" || s.kind === "area") swatch.append(node("rect", { x: 4, y: 1, width: 26, height: 10, ...fillOf(swatch, s) }));
      else {
        if (s.kind === "line") swatch.append(node("line", { x1: 1, x2: 33, y1: 6, y2: 6, ...strokeOf(s) }));
        if (s.kind === "points" || s.origin !== "modelled") swatch.append(marker(s, 17, 6, ""));
      }
      return html("li", {}, swatch, html("span", {}, s.name, " ", html("span", { class: "lsw-origin" }, s.origin)));
    }),
  );
}

// How an origin looks: published is hollow (diamond, dots), measured is solid, modelled is dashed or hatched.

const color = (s) => `var(--${s.color})`;

function strokeOf(s) {
  const dash = { published: "1 4", measured: "none", modelled: "7 4" }[s.origin];
  return { stroke: color(s), "stroke-width": s.origin === "published" ? 1.5 : 2.2, "stroke-dasharray": dash, "stroke-linejoin": "round" };
}

function fillOf(svg, s) {
  if (s.origin === "measured") return { fill: color(s), stroke: color(s) };
  if (s.origin === "published") return { fill: color(s), "fill-opacity": 0.12, stroke: color(s), "stroke-width": 2 };
  const id = `lsw-hatch-${(counter += 1)}-${Math.random().toString(36).slice(2, 8)}`;
  const pattern = node("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(node("rect", { width: 6, height: 6, fill: color(s), opacity: 0.4 }), node("rect", { width: 3, height: 6, fill: color(s) }));
  svg.append(node("defs", {}, pattern));
  return { fill: `url(#${id})`, stroke: color(s) };
}

function marker(s, x, y, words) {
  const diamond = `M ${x} ${y - 6} L ${x + 6} ${y} L ${x} ${y + 6} L ${x - 6} ${y} Z`;
  const shape =
    s.origin === "published"
      ? node("path", { d: diamond, fill: "var(--jp-layout-color0, Canvas)", stroke: color(s), "stroke-width": 2 })
      : s.origin === "measured"
        ? node("circle", { cx: x, cy: y, r: 4, fill: color(s) })
        : node("rect", { x: x - 3.5, y: y - 3.5, width: 7, height: 7, fill: "none", stroke: color(s), "stroke-width": 2 });
  if (words) shape.append(node("title", {}, words));
  return shape;
}

// ------------------------------------------------------------------------------------------------ scales

function scale(kind, [from, to], start, end) {
  const f = kind === "log" ? Math.log10 : (v) => v;
  const [a, b] = [f(from), f(to)];
  return (value) => start + ((f(value) - a) / (b - a || 1)) * (end - start);
}

function bandScale(names, start, end) {
  const step = (end - start) / names.length;
  const place = (name) => start + step * (names.indexOf(name) + 0.5);
  place.step = step;
  return place;
}

/** Round ticks around the values, and the domain they span. */
function ticks(kind, values, fromZero, about, whole) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (kind === "log") {
    const powers = [];
    const [a, b] = [Math.floor(Math.log10(low) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)];
    if (b - a <= 2) {
      [low, high] = [low / 1.15, high * 1.15];
      const steps = high / low < 8 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : [1, 2, 5];
      for (let p = a; p <= b; p += 1) steps.forEach((m) => powers.push(m * 10 ** p));
      const inside = powers.filter((v) => v >= low && v <= high);
      return { shown: inside.length > 1 ? inside : [low, high], domain: [low, high] };
    }
    for (let p = a; p <= b; p += Math.ceil((b - a) / 8)) powers.push(10 ** p);
    return { shown: powers, domain: [10 ** a, Math.max(10 ** b, powers.at(-1))] };
  }
  if (fromZero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  // A constant, up to rounding, still gets an axis.
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough - 1e-12);
  if (whole) step = Math.max(1, Math.ceil(step));
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  const shown = [];
  for (let n = first; n <= last; n += 1) shown.push(Number((n * step).toPrecision(12)));
  return { shown, domain: [shown[0], shown.at(-1)] };
}

/** A tick's text: no zeros after the last digit that says something. */
function tick(value) {
  const text = number(value, 3);
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

function short(value) {
  if (value >= 1e6) return `${tick(value / 1e6)}M`;
  return value >= 1e3 ? `${tick(value / 1e3)}k` : tick(value);
}

function wrap(text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (longer.length <= Math.max(6, width) || !lines.at(-1)) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

// ------------------------------------------------------------------------------------------------ elements

function html(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function node(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  element.append(...children);
  return element;
}
