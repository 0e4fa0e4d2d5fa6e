// One step as it ran; the twin of view_of in replay_timeline.py.

import { number, select, widget } from "./shared.js";

const MB = 1e6;
const LEDGERS = {
  rows: "blue", carry: "sky", gradient_pages: "purple", gradients: "yellow", logits: "green", optimizer: "grey", graph: "orange",
};
const GHOSTS = {
  all_graphs: "every response's graph held",
  conventional: "conventional autograd, all graphs held",
  none: "nothing beside it",
};

const words = (name) => name.replaceAll("_", " ");
const axis = (label) => ({ label, scale: "linear", ticks: "plain" });
const empty = "Nothing recorded for this choice.";

function view(record, state) {
  const own = select(record.traces, { case: state.case, scope: state.scope });
  const [serial] = select(own, { mode: "serial_replay" });
  const [ghost] = select(own, { mode: state.ghost });
  if (!serial) {
    const panel = { title: "Live bytes", x: axis("seconds"), y: axis("MB"), series: [], marks: [], empty };
    const table = { caption: "No step", headings: ["ledger", "origin", "MB"], rows: [] };
    return { says: "No step is recorded for this choice.", panels: [panel], table, notes: record.notes };
  }
  const at = indexAt(serial, state.moment);
  const now = serial.seconds[at];
  const name = GHOSTS[state.ghost];
  const marks = [{ axis: "x", value: now, label: `${number(now, 3)} s`, origin: "" }];
  const areas = Object.entries(LEDGERS).flatMap(([ledger, color]) => {
    const sizes = serial.ledgers[ledger] ?? [];
    const series = { name: words(ledger), origin: serial.origin, color, kind: "area", x: serial.seconds, y: sizes.map((v) => v / MB) };
    return sizes.some((v) => v) ? [series] : [];
  });
  const graphs = [line("serial replay", "blue", serial, serial.graphs_alive)];
  if (ghost) {
    areas.push(line(`total, ${name}`, "grey", ghost, ghost.ledgers.total.map((v) => v / MB)));
    graphs.push(line(name, "grey", ghost, ghost.graphs_alive));
  }
  const seconds = axis("seconds since the step's start");
  return {
    says: sentence(serial, ghost, at, name),
    panels: [
      { title: "Live bytes above the weights, by ledger", x: seconds, y: axis("MB"), series: areas, marks, empty },
      { title: "Complete graphs alive", x: seconds, y: { ...axis("graphs"), ticks: "whole" }, series: graphs, marks, empty },
      {
        title: "Where in the sequence: chunks forward, responses, chunks back", x: seconds, y: axis("first token"),
        series: [line("segment in work", "blue", serial, serial.positions)], marks, empty,
      },
    ],
    table: {
      caption:
        `At ${number(now, 3)} s: stage ${words(serial.stages[at]) || "none"}, ` +
        `segment at token ${number(serial.positions[at])}, ${serial.graphs_alive[at]} graphs alive`,
      headings: ["ledger", "origin", "MB now", "MB at most"],
      rows: tableRows(serial, at, ghost, state.moment, name),
    },
    notes: record.notes,
  };
}

function indexAt({ seconds }, moment) {
  const wanted = seconds[0] + (moment / 100) * (seconds.at(-1) - seconds[0]);
  return Math.max(0, seconds.findLastIndex((value) => value <= wanted));
}

function line(name, color, trace, values) {
  return { name, origin: trace.origin, color, kind: "line", x: trace.seconds, y: values };
}

const total = (trace, at) => Object.values(trace.ledgers).reduce((sum, sizes) => sum + sizes[at], 0);
const peak = (trace) => Math.max(...trace.seconds.map((_, at) => total(trace, at)));

function sentence(serial, ghost, at, name) {
  const first =
    `The step peaks at ${number(peak(serial) / MB)} MB with at most ${Math.max(...serial.graphs_alive)} graph alive ` +
    `(${serial.origin}); now ${number(total(serial, at) / MB)} MB.`;
  if (!ghost) return first;
  return (
    `${first} With ${name} it peaks at ${number(peak(ghost) / MB)} MB, with ${Math.max(...ghost.graphs_alive)} graphs alive ` +
    `(${ghost.origin}).`
  );
}

function tableRows(serial, at, ghost, moment, name) {
  const rows = Object.keys(LEDGERS).flatMap((ledger) => {
    const sizes = serial.ledgers[ledger] ?? [];
    if (!sizes.some((v) => v)) return [];
    return [[words(ledger), serial.origin, number(sizes[at] / MB), number(Math.max(...sizes) / MB)]];
  });
  rows.push(["all ledgers", serial.origin, number(total(serial, at) / MB), number(peak(serial) / MB)]);
  if (ghost) {
    const now = total(ghost, indexAt(ghost, moment));
    rows.push([`${name}, at the same share of its step`, ghost.origin, number(now / MB), number(peak(ghost) / MB)]);
  }
  return rows;
}

export default widget(view);
