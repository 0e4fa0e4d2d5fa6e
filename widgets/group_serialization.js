// Peak memory and step time against the group's size; the twin of view_of in group_serialization.py.

import { distinct, exact, number, select, widget } from "./shared.js";

const MODES = {
  serial_replay: ["serial replay", "blue"],
  all_graphs: ["every response's graph held", "orange"],
  conventional: ["conventional autograd, all graphs held", "purple"],
};

function view(record, state) {
  const ceiling = record.ceilings[state.case] ?? null;
  const [unit, scale] = ceiling === null ? ["MB", 1e6] : ["GB", 1e9];
  const own = select(record.points, { case: state.case, scope: state.scope });
  let tokens = state.response_tokens;
  // A recording has the lengths that it has.
  if (own.length && own.every((p) => p.response_tokens !== tokens)) tokens = own[0].response_tokens;
  const shown = select(own, { response_tokens: tokens });
  const size = state.group_size;
  const [memory, seconds, rows] = [[], [], []];
  for (const key of distinct(shown.map((p) => `${p.origin}|${p.mode}`))) {
    const [origin, mode] = key.split("|");
    const points = select(shown, { origin, mode });
    const [name, color] = MODES[mode];
    const series = { name, origin, color, kind: "line" };
    memory.push({ ...series, x: points.map((p) => p.group_size), y: points.map((p) => p.peak_bytes / scale) });
    const timed = points.filter((p) => p.step_seconds !== null);
    if (timed.length) seconds.push({ ...series, x: timed.map((p) => p.group_size), y: timed.map((p) => p.step_seconds) });
    const here = points.find((p) => p.group_size === size);
    const [first, last] = [points.find((p) => p.group_size > 1) ?? points[0], points.at(-1)];
    const growth = 100 * (last.peak_bytes / first.peak_bytes - 1);
    rows.push([
      name,
      origin,
      here ? peak(here, scale) : `not ${origin} at this G`,
      here && ceiling !== null ? (here.peak_bytes <= ceiling ? "yes" : "no") : "–",
      here ? number(here.step_seconds) : "–",
      `${number(growth, 3)} % from G = ${first.group_size} to ${last.group_size}`,
    ]);
  }
  const chosen = { axis: "x", value: size, label: `G = ${size}`, origin: "" };
  const limit =
    ceiling === null
      ? []
      : [{ axis: "y", value: ceiling / scale, label: `the card, ${exact(ceiling / scale)} GB`, origin: "published" }];
  const x = { label: "group size G, responses", scale: "log", ticks: "plain" };
  const empty = "Nothing recorded for this choice.";
  return {
    says: sentence(shown, size, tokens, scale, unit),
    panels: [
      { title: "Peak memory", x, y: { label: `peak, ${unit}`, scale: "log", ticks: "plain" }, series: memory, marks: [...limit, chosen], empty },
      { title: "Time of one step", x, y: { label: "seconds", scale: "log", ticks: "plain" }, series: seconds, marks: [chosen], empty },
    ],
    table: {
      caption: `At G = ${size}, responses of ${number(tokens)} tokens, scope ${state.scope}`,
      headings: ["way", "origin", `peak, ${unit}`, "within the card", "step, s", "growth of the peak"],
      rows,
    },
    notes: record.notes,
  };
}

function peak(point, scale) {
  const value = point.peak_bytes / scale;
  return point.origin === "published" ? exact(value) : number(value, 5);
}

function sentence(shown, size, tokens, scale, unit) {
  const here = Object.fromEntries(shown.filter((p) => p.group_size === size && p.origin !== "published").map((p) => [p.mode, p]));
  const serial = here.serial_replay;
  const held = here.conventional ?? here.all_graphs;
  if (!serial || !held) return `No step with G = ${size} was ${shown.length ? shown[0].origin : "recorded"} for this choice; see the curves.`;
  return (
    `With ${size} responses of ${number(tokens)} tokens, serial replay needs ${number(serial.peak_bytes / scale)} ${unit} ` +
    `(${serial.origin}) and ${MODES[held.mode][0]} ${number(held.peak_bytes / scale)} ${unit} (${held.origin}): ` +
    `${number(held.peak_bytes / serial.peak_bytes, 3)} times as much.`
  );
}

export default widget(view);
