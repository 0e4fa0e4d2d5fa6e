"""What notebooks/10_plan.ipynb does between its prose: its parameters, and the tables behind its figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from workbench.errors import InvalidInputError
from workbench.planner import (
    TERMS,
    Plan,
    best_chunk,
    largest_group,
    largest_positions,
    plan,
    published_table,
    smallest_context_parallel,
)
from workbench.planner.questions import with_request
from workbench.types import GradientScope, Sampled, Tail

GB = 1e9
GRID_GPUS = ("H20-3e-141", "H200-SXM", "H100-80-SXM", "B200")
FRONTIER_SCOPES: Mapping[str, GradientScope] = {"full": "full", "response_only": "response_only"}


class PlanParameters(BaseModel):
    """The parameters of notebooks/10_plan.ipynb; an unknown name, or a value that does not fit, is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    gpu: str
    prompt_tokens: PositiveInt
    group_size: PositiveInt
    response_tokens: PositiveInt
    context_parallel: PositiveInt
    expert_parallel: PositiveInt
    gradient_scope: str
    weights: str
    chunk_tokens: int = Field(ge=0)  # 0: the chunk with the lowest peak
    checkpoint_layers: bool
    placement: str
    calibration: str | None

    def scope(self) -> GradientScope:
        """ "full", "response_only", "prefix_frozen", "tail:<chunks>" or "sampled:<fraction>"."""
        kind, _, value = self.gradient_scope.partition(":")
        try:
            if kind == "tail":
                return Tail(int(value))
            if kind == "sampled":
                return Sampled(float(value))
        except ValueError as error:
            raise InvalidInputError(f"gradient_scope={self.gradient_scope!r}: {error}") from None
        return self.gradient_scope


def make_plan(parameters: PlanParameters) -> Plan:
    """The plan; with chunk_tokens=0, of the best chunk."""
    planned = plan(
        parameters.model,
        parameters.gpu,
        positions=parameters.prompt_tokens + parameters.response_tokens,
        group_size=parameters.group_size,
        response_tokens=parameters.response_tokens,
        context_parallel=parameters.context_parallel,
        expert_parallel=parameters.expert_parallel,
        gradient_scope=parameters.scope(),
        weights=parameters.weights,
        checkpoint_layers=parameters.checkpoint_layers,
        placement=parameters.placement,
        calibration=parameters.calibration,
        **({"chunk_tokens": parameters.chunk_tokens} if parameters.chunk_tokens else {}),
    )
    return planned if parameters.chunk_tokens else with_request(planned, chunk_tokens=best_chunk(planned))


def grid_options(parameters: PlanParameters, planned: Plan) -> dict[str, Any]:
    """What the widget's grid of plans shares with this plan; a grid of its own has lengths, ranks, cards and scopes."""
    gpus = [planned.gpu.name, *(name for name in GRID_GPUS if name != planned.gpu.name)]
    lengths = {2**power for power in range(15, 23)} | {planned.request.positions}
    # Shorter chunks than ranks cannot be planned, nor prompts shorter than one response.
    ranks = [n for n in (1, 2, 4, 8, 16, 32) if n <= planned.request.chunk_tokens]
    return {
        "gpus": gpus,
        "positions": sorted(n for n in lengths if n > planned.request.response_tokens + 1),
        "context_parallel": sorted({*ranks, planned.request.context_parallel}),
        "response_tokens": planned.request.response_tokens,
        "weights": parameters.weights,
        "chunk_tokens": planned.request.chunk_tokens,
        "checkpoint_layers": parameters.checkpoint_layers,
        "placement": parameters.placement,
    }


def verdict_rows(planned: Plan) -> list[list[Any]]:
    """The answer in a few lines."""
    low, high = planned.peak_band
    return [
        ["verdict", planned.verdict],
        ["peak per rank, GB", planned.peak_bytes / GB],
        ["its band, GB", f"{low / GB:,.1f} to {high / GB:,.1f}"],
        ["first step's peak, GB", planned.first_step_peak_bytes / GB],
        ["outside the allocator, GB", planned.gpu.reserve_bytes / GB],
        ["the card, GB", planned.ceiling_bytes / GB],
        ["peak in phase", planned.peak_phase],
        ["bound by", planned.binding],
        ["host memory per rank, GB", planned.host_bytes / GB],
        ["chunk", planned.request.chunk_tokens],
    ]


def peak_rows(planned: Plan) -> list[list[Any]]:
    """Terms of the peak phase: GB, band, origin, formula; the largest first, without empty ones."""
    found = [term for term in planned.details if term.phase == planned.peak_phase and term.value]
    found.sort(key=lambda term: -term.value)
    bands = ["" if t.low == t.high else f"{t.low / GB:,.2f} to {t.high / GB:,.2f}" for t in found]
    return [[t.term, t.value / GB, band, t.origin, t.formula] for t, band in zip(found, bands, strict=True)]


def published_rows() -> tuple[list[str], list[list[Any]]]:
    """Headings and rows of the published runs; gigabytes with all the digits that were printed."""
    table = published_table()
    decimals = {"published GB": 3, "planned GB": 3, "error %": 2, "this engine GB": 1}
    rows = [[f"{v:.{decimals[k]}f}" if k in decimals else v for k, v in row.items()] for row in table]
    return list(table[0]), rows


def answer_rows(planned: Plan) -> list[list[Any]]:
    """The questions turned round."""
    group = largest_group(planned)
    return [
        ["most positions that surely fit", largest_positions(planned)],
        ["most positions that may fit", largest_positions(planned, verdict="probe")],
        ["largest group", "any" if group is None else group],
        ["fewest ranks that surely fit", smallest_context_parallel(planned) or "none up to 1,024"],
        ["chunk with the lowest peak", best_chunk(planned)],
    ]


def frontier(planned: Plan) -> dict[str, dict[int, int]]:
    """scope -> ranks -> most positions that surely fit, ranks in powers of two up to eight times those asked for."""
    request = planned.request
    ranks = [request.expert_parallel * 2**power for power in range(8)]
    ranks = [n for n in ranks if n <= min(8 * request.context_parallel, request.chunk_tokens)]
    points: dict[str, dict[int, int]] = {}
    for name, scope in FRONTIER_SCOPES.items():
        changes: dict[str, Any] = {"gradient_scope": scope, "adapter_scope": "all", "num_gpus": None}
        plans = {n: with_request(planned, context_parallel=n, **changes) for n in ranks}
        points[name] = {n: found for n, plan_ in plans.items() if (found := largest_positions(plan_))}
    return points


def phase_terms(planned: Plan) -> dict[str, dict[str, float]]:
    """phase -> term -> GB, terms that are zero everywhere left out."""
    used = [term for term in TERMS if any(terms[term] for terms in planned.terms.values())]
    return {phase: {term: terms[term] / GB for term in used} for phase, terms in planned.terms.items()}


def plan_results(planned: Plan, answers: list[list[Any]]) -> dict[str, Any]:
    """What the run's record keeps."""
    return {
        "verdict": planned.verdict,
        "binding": planned.binding,
        "peak_bytes": planned.peak_bytes,
        "first_step_peak_bytes": planned.first_step_peak_bytes,
        "peak_band": planned.peak_band,
        "host_bytes": planned.host_bytes,
        "planned_seconds": planned.seconds_lines,
        "terms": planned.terms,
        "answers": dict(answers),
    }
