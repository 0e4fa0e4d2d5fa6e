// Each gradient scope against the full gradient; the twin of view_of in gradient_scope.py.

import { distinct, number, select, widget } from "./shared.js";

const METRICS = { cosine: "cosine with the full gradient", relative_l2: "relative L2 distance from the full gradient" };
const GATES = { cosine: 0.999, relative_l2: 0.01 };
const DETAILS = { layer: "decoder layer", parameter_family: "kind of parameter" };
const PALETTE = ["orange", "blue", "green", "purple", "sky", "yellow", "grey"];

function view(record, state) {
  const { metric, detail, prompt_tokens: length } = state;
  const own = select(record.points, { case: state.case });
  const whole = select(own, { layer: null, parameter_family: "all" });
  const scopes = distinct(whole.map((p) => p.scope));
  const parts = select(own, { prompt_tokens: length }).filter((p) => isPart(p, detail));
  const lengths = scopes.map((scope, at) => byLength(select(whole, { scope }), scope, at, metric));
  const details = scopes.flatMap((scope, at) => byPart(select(parts, { scope }), scope, at, metric, detail));
  const here = select(whole, { prompt_tokens: length });
  const gate = { axis: "y", value: GATES[metric], label: `parity gate ${GATES[metric]}`, origin: "published" };
  const y = { label: METRICS[metric], scale: "linear", ticks: "plain" };
  const empty = "Nothing recorded for this choice.";
  const chosen = length ? [{ axis: "x", value: length, label: `${number(length)} tokens`, origin: "" }] : [];
  const band = { label: DETAILS[detail], scale: detail === "layer" ? "linear" : "band", ticks: "whole" };
  return {
    says: sentence(here, length),
    panels: [
      { title: "By prompt length", x: { label: "prompt, tokens", scale: "log", ticks: "short" }, y, series: lengths, marks: [gate, ...chosen], empty },
      { title: `By ${DETAILS[detail]}, ${number(length)} tokens`, x: band, y, series: details, marks: [gate], empty },
    ],
    table: {
      caption: `Against the full gradient, ${number(length)} prompt tokens`,
      headings: ["scope", "origin", "cosine", "relative L2", "runs"],
      rows: here.map((p) => [p.scope, p.origin, cell(p.cosine), cell(p.relative_l2), String(p.runs)]),
    },
    notes: record.notes,
  };
}

function isPart(point, detail) {
  const wholeFamily = point.parameter_family === "all";
  return detail === "layer" ? point.layer !== null && wholeFamily : point.layer === null && !wholeFamily;
}

function byLength(points, scope, at, metric) {
  const ordered = [...points].sort((a, b) => a.prompt_tokens - b.prompt_tokens);
  const column = (part) => ordered.map((p) => p[metric][part]);
  return {
    name: scope,
    origin: ordered[0].origin,
    color: PALETTE[at % PALETTE.length],
    kind: "line",
    x: ordered.map((p) => p.prompt_tokens),
    y: column(0),
    low: column(1),
    high: column(2),
  };
}

function byPart(points, scope, at, metric, detail) {
  if (!points.length) return [];
  const ordered = detail === "layer" ? [...points].sort((a, b) => a.layer - b.layer) : points;
  return [
    {
      name: scope,
      origin: ordered[0].origin,
      color: PALETTE[at % PALETTE.length],
      kind: detail === "layer" ? "line" : "bars",
      x: ordered.map((p) => p[detail]),
      y: ordered.map((p) => p[metric][0]),
    },
  ];
}

function sentence(here, length) {
  const [short] = select(here, { scope: "response_only" });
  if (!short) return "No gradient of scope response_only is recorded for this choice.";
  return (
    `With a prompt of ${number(length)} tokens, response_only has cosine ${number(short.cosine[0], 3)} with the full gradient ` +
    `and relative L2 ${number(short.relative_l2[0], 3)}: that much of the update is missing (${short.origin}).`
  );
}

function cell([mean, low, high]) {
  return low === high ? number(mean) : `${number(mean)} (${number(low, 3)} to ${number(high, 3)})`;
}

export default widget(view);
