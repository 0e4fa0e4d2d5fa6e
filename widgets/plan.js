// The planner as a form; the twin of view_of in plan.py. Answers are looked up, two closed forms apart.

import { number, select, verdict, widget } from "./shared.js";

const GB = 1e9;
const PHASES = ["load", "capture", "score", "replay", "prompt_gradient", "optimizer"];
const ALLOCATED = [
  "weights", "adapter", "optimizer", "rows", "carry", "boundary_carries", "gradient_pages", "graph", "logits", "workspace",
];
const GROUPS = {
  weights: [["weights"], "grey"],
  "adapter and optimizer": [["adapter", "optimizer"], "yellow"],
  rows: [["rows"], "blue"],
  carries: [["carry", "boundary_carries"], "sky"],
  "gradient pages": [["gradient_pages"], "purple"],
  graph: [["graph"], "orange"],
  "logits and workspace": [["logits", "workspace"], "green"],
};
const ANSWERS = {
  fits: "It fits, even at the upper end of all bands",
  probe: "It may fit: the middle of the bands does, the upper end does not; run one short step to know",
  no: "It does not fit",
};

const words = (name) => name.replaceAll("_", " ");
const sum = (cell, phase, terms) => terms.reduce((total, term) => total + cell.terms[phase][ALLOCATED.indexOf(term)], 0);

function view(record, state) {
  const { model, context_parallel, scope, positions } = state;
  const [cell] = select(record.cells, { model, context_parallel, scope, positions });
  const [card] = select(record.cards, { name: state.gpu });
  const phases = PHASES.map(words);
  const stacked = Object.entries(GROUPS).flatMap(([name, [terms, color]]) => {
    const values = PHASES.map((phase) => sum(cell, phase, terms));
    const series = { name, origin: "modelled", color, kind: "bars", stack: true, x: phases, y: values.map((v) => v / GB) };
    return values.some((v) => v) ? [series] : [];
  });
  const seconds = Object.fromEntries(
    Object.entries(cell.seconds[card.name]).map(([phase, [fixed, member]]) => [phase, fixed + state.group_size * member]),
  );
  const times = {
    name: "seconds", origin: "modelled", color: "blue", kind: "bars",
    x: Object.keys(seconds).map(words), y: Object.values(seconds),
  };
  const usable = (card.memory_bytes - card.reserve_bytes) / GB;
  const band = { label: "phase of the step", scale: "band", ticks: "plain" };
  const empty = "Nothing recorded for this choice.";
  const limit = { axis: "y", value: usable, label: `${card.name}, ${number(usable)} GB usable`, origin: "modelled" };
  const total = Object.values(seconds).reduce((a, b) => a + b, 0);
  return {
    says: sentence(cell, card, total),
    panels: [
      { title: "Bytes per rank by phase", x: band, y: { label: "GB", scale: "linear", ticks: "plain" }, series: stacked, marks: [limit], empty },
      { title: "Time of one step", x: band, y: { label: "seconds", scale: "linear", ticks: "plain" }, series: [times], marks: [], empty },
    ],
    table: {
      caption:
        `${cell.model}, ${number(cell.positions)} positions, G = ${state.group_size}, ` +
        `${number(cell.context_parallel)} ranks of ${card.name}, scope ${cell.scope}`,
      headings: ["phase", "origin", "GB per rank", "largest term", "of it, GB", "seconds"],
      rows: PHASES.map((phase) => tableRow(cell, phase, seconds)),
    },
    notes: record.notes,
  };
}

function bindingTerm(cell, phase) {
  return ALLOCATED[cell.terms[phase].indexOf(Math.max(...cell.terms[phase]))];
}

function sentence(cell, card, seconds) {
  return (
    `${ANSWERS[verdict(cell, card)]}: ${number(cell.peak_bytes / GB)} GB per rank ` +
    `(${number(cell.peak_low / GB)} to ${number(cell.peak_high / GB)}) of ${number(card.memory_bytes / GB)}, in the phase ` +
    `${words(cell.peak_phase)}, bound by ${words(bindingTerm(cell, cell.peak_phase))}; ${number(seconds)} s a step (modelled).`
  );
}

function tableRow(cell, phase, seconds) {
  const largest = bindingTerm(cell, phase);
  return [
    words(phase),
    "modelled",
    number(sum(cell, phase, ALLOCATED) / GB),
    words(largest),
    number(sum(cell, phase, [largest]) / GB),
    phase in seconds ? number(seconds[phase]) : "–",
  ];
}

export default widget(view);
