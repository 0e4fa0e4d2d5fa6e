// Peak bytes per rank against positions; the twin of view_of in context_frontier.py.

import { exact, number, select, verdict, widget } from "./shared.js";

const GB = 1e9;

function view(record, state) {
  const cells = select(record.cells, { model: state.model, context_parallel: state.context_parallel, scope: state.scope });
  const [card] = select(record.cards, { name: state.gpu });
  const printed = select(record.published, { model: state.model, gpu: state.gpu, context_parallel: state.context_parallel });
  const [here] = select(cells, { positions: state.positions });
  const column = (name) => cells.map((cell) => cell[name] / GB);
  const planned = {
    name: "peak per rank", origin: "modelled", color: "blue", kind: "line",
    x: cells.map((cell) => cell.positions), y: column("peak_bytes"), low: column("peak_low"), high: column("peak_high"),
  };
  const dots = {
    name: "LongStraw's peaks", origin: "published", color: "orange", kind: "points",
    x: printed.map((p) => p.positions), y: printed.map((p) => p.peak_gb),
  };
  const usable = (card.memory_bytes - card.reserve_bytes) / GB;
  const marks = [
    { axis: "y", value: usable, label: `${card.name}, ${number(usable)} GB usable`, origin: "modelled" },
    { axis: "x", value: here.positions, label: number(here.positions), origin: "" },
  ];
  if (printed.length) marks.push({ axis: "x", value: record.out_of_memory, label: "OOM (published)", origin: "" });
  const bars = [["published", "orange"], ["measured", "blue"]].flatMap(([origin, color]) => {
    const found = select(record.reaches, { origin });
    const series = { name: "context reached", origin, color, kind: "bars", stack: true };
    return found.length ? [{ ...series, x: found.map((r) => r.name), y: found.map((r) => r.positions / 1e6) }] : [];
  });
  const fitting = cells.filter((cell) => verdict(cell, card) === "fits").map((cell) => cell.positions);
  const empty = "Nothing recorded for this choice.";
  return {
    says: sentence(here, card, fitting),
    panels: [
      {
        title: "Peak memory per rank", x: { label: "positions (prompt and one response)", scale: "log", ticks: "short" },
        y: { label: "peak, GB", scale: "log", ticks: "plain" }, series: [planned, ...(printed.length ? [dots] : [])], marks, empty,
      },
      {
        title: "Context reached", x: { label: "setting", scale: "band", ticks: "plain" },
        y: { label: "million positions", scale: "linear", ticks: "plain" }, series: bars, marks: [], empty,
      },
    ],
    table: {
      caption: `${here.model}, ${number(here.context_parallel)} ranks of ${card.name}, scope ${here.scope}`,
      headings: ["positions", "origin", "peak per rank, GB", "band, GB", "verdict", "what"],
      rows: [...cells.map((cell) => plannedRow(cell, card)), ...printed.map(printedRow)],
    },
    notes: record.notes,
  };
}

function sentence(here, card, fitting) {
  const answer = { fits: "fits", no: "does not fit", probe: "may fit: probe it" }[verdict(here, card)];
  const longest = fitting.length
    ? `the longest planned here that surely fits is ${number(Math.max(...fitting))}`
    : "none planned here surely fits";
  return (
    `${number(here.positions)} positions need ${number(here.peak_bytes / GB)} GB per rank and ` +
    `${number(card.reserve_bytes / GB, 3)} GB outside the allocator, of ${number(card.memory_bytes / GB)} GB: ${answer}; ` +
    `${longest} (modelled).`
  );
}

function plannedRow(cell, card) {
  const band = `${number(cell.peak_low / GB)} to ${number(cell.peak_high / GB)}`;
  return [number(cell.positions), "modelled", number(cell.peak_bytes / GB), band, verdict(cell, card), "this engine's plan"];
}

function printedRow(peak) {
  return [number(peak.positions), "published", exact(peak.peak_gb), "–", "ran", peak.name];
}

export default widget(view);
