// Drift of a reused prompt by its age; the twin of view_of in prefix_reuse_drift.py.

import { exact, number, select, widget } from "./shared.js";

const METRICS = {
  mean_abs_logprob_drift: ["Log-prob drift", "mean |difference| of log-prob, nats"],
  loss_drift_pct: ["Loss drift", "|difference| of the loss, %"],
};
const DRIFT = "mean_abs_logprob_drift";

function view(record, state) {
  const { case: name, interval, tolerance } = state;
  const curves = Object.fromEntries(select(record.curves, { case: name }).map((curve) => [curve.metric, curve]));
  const panels = Object.entries(METRICS).map(([metric, [title, label]]) => {
    const found = curves[metric];
    const marks = [{ axis: "x", value: interval - 1, label: `oldest state, age ${interval - 1}`, origin: "" }];
    if (metric === DRIFT) marks.push({ axis: "y", value: tolerance, label: `tolerance ${number(tolerance, 1)}`, origin: "" });
    return {
      title,
      x: { label: "age of the state, optimizer steps since capture", scale: "linear", ticks: "whole" },
      y: { label, scale: found && Math.min(...found.low) > 0 ? "log" : "linear", ticks: "plain" },
      series: found ? [series(found)] : [],
      marks,
      empty: "Nothing recorded for this choice.",
    };
  });
  return {
    says: sentence(record, state, curves[DRIFT]),
    panels,
    table: {
      caption: `${name}: drift by age`,
      headings: ["age, steps", "origin", ...Object.values(METRICS).map(([, label]) => label), "used by this interval", "within tolerance"],
      rows: tableRows(curves, interval, tolerance),
    },
    notes: record.notes,
  };
}

function series(curve) {
  const many = curve.runs > 1;
  return {
    name: many ? `mean of ${curve.runs} runs, band from lowest to highest` : curve.case,
    origin: curve.origin,
    color: curve.metric === DRIFT ? "blue" : "orange",
    kind: "line",
    x: curve.ages,
    y: curve.mean,
    low: many ? curve.low : null,
    high: many ? curve.high : null,
  };
}

function recommendedInterval({ ages, high }, tolerance) {
  const beyond = high.findIndex((worst) => worst > tolerance);
  const last = beyond === -1 ? ages.length - 1 : beyond - 1;
  return (last < 0 ? 0 : ages[last]) + 1;
}

function sentence(record, { case: name, interval, steps, tolerance }, drift) {
  const captures = Math.ceil(steps / interval);
  let words =
    `A refresh every ${interval} of ${steps} steps makes ${captures} captures instead of ${steps}: ` +
    `${number(100 * (1 - captures / steps), 3)} % of the capture time is saved`;
  const [cost] = select(record.costs, { case: name });
  if (cost) {
    const seconds = (steps - captures) * cost.capture_seconds;
    const share = (100 * seconds) / (steps * (cost.capture_seconds + cost.step_seconds));
    words += `, ${number(seconds, 3)} s or ${number(share, 3)} % of the whole (${cost.origin})`;
  }
  words += ". ";
  if (drift) {
    const more = drift.high.every((worst) => worst <= tolerance) ? " or longer: no recorded age exceeds it" : "";
    words += `Within a log-prob drift of ${number(tolerance, 1)} nats the interval may be ${recommendedInterval(drift, tolerance)}${more} (${drift.origin}).`;
  }
  return words;
}

function tableRows(curves, interval, tolerance) {
  const all = Object.values(curves);
  const ages = [...new Set(all.flatMap((curve) => curve.ages))].sort((a, b) => a - b);
  return ages.map((age) => {
    const at = (metric) => (curves[metric] ? curves[metric].ages.indexOf(age) : -1);
    const cells = Object.keys(METRICS).map((metric) => (at(metric) < 0 ? "–" : cell(curves[metric], at(metric))));
    const worst = at(DRIFT) < 0 ? null : curves[DRIFT].high[at(DRIFT)];
    const within = worst === null ? "–" : worst <= tolerance ? "yes" : "no";
    return [String(age), all[0].origin, ...cells, age < interval ? "yes" : "no", within];
  });
}

function cell(curve, at) {
  if (curve.runs === 1) return curve.origin === "published" ? exact(curve.mean[at]) : number(curve.mean[at]);
  return `${number(curve.mean[at])} (${number(curve.low[at], 3)} to ${number(curve.high[at], 3)})`;
}

export default widget(view);
