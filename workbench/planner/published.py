"""The published LongStraw runs, planned: their figures with our formulas and, by name, the choices that differ.

LongStraw's code is not runnable, so what its peaks contain is inferred. Each inference is one named choice of a
`PublishedRun`; `data/published.json` says what it means and whether it was made after seeing the figures (post hoc).
The agreement of 0.5 % is therefore a fit to that extent, and no evidence of predictive skill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from workbench.planner import sizes
from workbench.planner.request import Request
from workbench.planner.sources import find_model, read_data
from workbench.planner.step_plan import plan

GB = 1e9
VISION_TOWER_PARAMS = 460_730_096  # Qwen3.5 vision tower, transformers 5.24 on the meta device
BYTES_PER_LOGIT = 10  # float32 logit, its float32 gradient, a bf16 copy
BLOCK_TOKENS = 2048  # of the response, walked in reverse with whole-layer checkpoints
# Largest layer (Gated DeltaNet, 27B, bf16, bf16 LoRA r16) with a stand-in for the fused kernel: measured at real width.
SAVED_BYTES_PER_TOKEN = 392_168


@dataclass(frozen=True)
class Choices:
    """What a published run is taken to hold; True or False each, no fitted constant."""

    vision_tower: bool
    whole_response_logits: bool
    prompt_row_gradients: bool
    adam_moments: bool


@dataclass(frozen=True)
class PublishedRun:
    """One published peak. peak_gb: allocated per rank, 1e9 bytes, as printed."""

    name: str
    model: str
    gpu: str
    context_parallel: int
    positions: int
    group_size: int
    response_tokens: int
    peak_gb: float
    paper_version: str
    mark: str
    confidence: str
    choices: Choices
    seconds: Mapping[str, float] | None = None

    @property
    def request(self) -> Request:
        """LongStraw replicates carries and the response on every rank, which `terms` accounts for."""
        return Request(
            positions=self.positions,
            group_size=self.group_size,
            response_tokens=self.response_tokens,
            context_parallel=self.context_parallel,
            weights="nf4",
            lora_rank=16,
        )

    def terms(self) -> dict[str, int]:
        """Bytes per rank by term."""
        shape, request, choices = find_model(self.model), self.request, self.choices
        rows = sizes.rows_bytes(shape, request)
        gradients = rows * (4 // request.compute_bytes)  # float32 pages of every row
        head_rows = self.response_tokens if choices.whole_response_logits else BLOCK_TOKENS // 2
        inputs = sizes.layer_inputs_bytes(shape, self.response_tokens, request.compute_bytes)
        return {
            "weights": sizes.weight_bytes(shape, request),
            "vision_tower": VISION_TOWER_PARAMS * request.compute_bytes if choices.vision_tower else 0,
            "adapter": sizes.adapter_bytes(shape, request) + sizes.gradient_bytes(shape, request),
            "optimizer": sizes.optimizer_bytes(shape, request) if choices.adam_moments else 0,
            "rows": rows,
            "gradient_pages": gradients if choices.prompt_row_gradients else 0,
            "carry": 2 * sizes.carry_bytes(shape, request.compute_bytes),
            "graph": inputs + BLOCK_TOKENS * SAVED_BYTES_PER_TOKEN,
            "logits": sizes.logits_bytes(head_rows, shape.vocab, BYTES_PER_LOGIT),
        }

    @property
    def planned_gb(self) -> float:
        return sum(self.terms().values()) / GB

    @property
    def error_pct(self) -> float:
        return 100 * (self.planned_gb / self.peak_gb - 1)

    def engine_plan_gb(self) -> float:
        """Our engine's first-step peak on the same inputs and scope, with its own choices."""
        ours = plan(
            self.model,
            self.gpu,
            positions=self.positions,
            group_size=self.group_size,
            response_tokens=self.response_tokens,
            context_parallel=self.context_parallel,
            gradient_scope="response_only",
            checkpoint_layers=True,
        )
        return ours.first_step_peak_bytes / GB


def published_runs() -> tuple[PublishedRun, ...]:
    """Every exactly reported peak, in the order of `data/published.json`."""
    known = {field.name for field in fields(PublishedRun)}
    return tuple(
        PublishedRun(**{k: v for k, v in run.items() if k in known} | {"choices": Choices(**run["choices"])})
        for run in read_data("published.json")["runs"]
    )


def post_hoc_choices() -> dict[str, str]:
    """Choices made after seeing the figures, with their meaning."""
    choices = read_data("published.json")["choices"]
    return {name: choice["meaning"] for name, choice in choices.items() if choice["post_hoc"]}


def published_table() -> list[dict[str, Any]]:
    """One row per run: printed figure, planned with its choices, error, and this engine's plan of the same inputs."""
    return [
        {
            "run": run.name,
            "positions": run.positions,
            "G": run.group_size,
            "published GB": run.peak_gb,
            "planned GB": round(run.planned_gb, 3),
            "error %": round(run.error_pct, 2),
            "this engine GB": round(run.engine_plan_gb(), 1),
            "paper": f"{run.paper_version}, {run.mark}",
        }
        for run in published_runs()
    ]
