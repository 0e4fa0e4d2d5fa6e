// Two metrics of a run folder; the twin of view_of in run_monitor.py.

import { number, widget } from "./shared.js";

function view(record, state) {
  const [panels, rows] = [[], []];
  for (const [name, color] of [[state.metric, "blue"], [state.second_metric, "orange"]]) {
    const [steps, values] = record.metrics[name] ?? [[], []];
    const series = [];
    if (steps.length) {
      const label = state.window === 1 ? name : `${name}, mean of ${state.window}`;
      const y = values.map((_, at) => mean(values, at, state.window));
      series.push({ name: label, origin: "measured", color, kind: "line", x: steps, y });
      rows.push([name, "measured", ...record.summaries[name].map((value) => number(value))]);
    }
    const marks = steps.length ? [{ axis: "x", value: steps.at(-1), label: `last: ${number(steps.at(-1))}`, origin: "" }] : [];
    const axis = (label) => ({ label, scale: "linear", ticks: "plain" });
    panels.push({ title: name, x: { ...axis("update"), ticks: "whole" }, y: axis(name), series, marks, empty: "Nothing recorded for this choice." });
  }
  rows.push(...record.facts.map(([name, value]) => [name, "–", value, "–", "–", "–"]));
  const curve = Object.values(record.metrics).find(([steps]) => steps.length);
  const reached = curve ? `update ${number(curve[0].at(-1))} was the last recorded` : "no update recorded";
  return {
    says: `${record.name} is ${record.status}; ${reached}.${record.error ? ` Error: ${record.error}` : ""}`,
    panels,
    table: { caption: "Latest values", headings: ["what", "origin", "last", "lowest", "highest", "count"], rows },
    notes: record.notes,
  };
}

function mean(values, at, window) {
  const known = values.slice(Math.max(0, at + 1 - window), at + 1).filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

export default widget(view);
