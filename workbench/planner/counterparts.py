"""Other planners on the same inputs: accelerate's estimate, and the mistakes that planners make with long prompts.

The mistakes are cases that were met elsewhere, each applied alone to this plan: what the peak would be said to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.planner import graph, sizes
from workbench.planner.published import BYTES_PER_LOGIT
from workbench.planner.sources import model_config
from workbench.planner.step_plan import Plan


@dataclass(frozen=True)
class Counterpart:
    """One other answer to the same question. peak_bytes: what it would say; why: what it counts or leaves out."""

    name: str
    peak_bytes: int
    why: str


def accelerate_estimate(model: str) -> dict[str, int]:
    """accelerate's own figures for a catalogue model, computed offline as `accelerate estimate-memory` does.

    "inference" is the float32 model, "training" the peak of its Adam estimate (4 x the model), both without
    activations, prompt length, group, quantisation or ranks: the command takes none of these.
    """
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(model_config(model))
    total, _ = calculate_maximum_sizes(empty)
    return {"inference": total, "training": max(estimate_training_usage(total, "float32").values())}


def common_mistakes(planned: Plan) -> tuple[Counterpart, ...]:
    """The plan's peak with one mistake each."""
    shape, request, peak = planned.shape, planned.request, planned.peak_bytes
    rows = planned.terms[planned.peak_phase]["rows"]
    held = planned.terms[planned.peak_phase]
    return (
        Counterpart("KV in every layer", peak + _rows_of_every_layer(planned) - rows,
                    "charges keys and values for layers that keep none, or only a window"),
        Counterpart("prompt once per response", peak + (request.group_size - 1) * rows,
                    f"counts the shared prompt {request.group_size} times"),
        Counterpart("no logits", peak - held["logits"], "forgets the head's logits"),
        Counterpart("logits of a whole response", peak + sizes.logits_bytes(request.response_tokens, shape.vocab,
                    BYTES_PER_LOGIT) - held["logits"], "materialises response x vocabulary"),
        Counterpart("no expert activations", peak - _expert_activations(planned),
                    "forgets what routed experts keep for their backward"),
        Counterpart("no prompt gradient", peak - held["gradient_pages"] - held["boundary_carries"],
                    "forgets gradient pages and boundary carries of the full scope"),
    )  # fmt: skip


def _rows_of_every_layer(planned: Plan) -> int:
    """As if each layer kept the rows of a full-attention layer."""
    full = [layer for layer, _ in planned.shape.groups if layer.mixer.row_elements and layer.mixer.row_limit is None]
    one = max(layer.mixer.row_elements for layer in full) * planned.request.compute_bytes
    return len(planned.shape.layers) * one * planned.request.rank_tokens(planned.request.positions)


def _expert_activations(planned: Plan) -> int:
    request = planned.request
    phase = planned.peak_phase
    if phase not in ("replay", "prompt_gradient") or request.rebuilds_layers:
        return 0
    tokens = -(-(request.largest_block if phase == "replay" else request.largest_chunk) // request.context_parallel)
    per_token = sum(count * graph.expert_bytes(layer.feed_forward, request) for layer, count in planned.shape.groups)
    return tokens * per_token


def counterpart_table(model: str, planned: Plan) -> list[dict[str, Any]]:
    """One row per counterpart, with its peak against ours."""
    estimate = accelerate_estimate(model)
    others = [
        Counterpart("accelerate, inference", estimate["inference"], "float32 weights alone"),
        Counterpart(
            "accelerate, training", estimate["training"], "float32 weights x 4 (gradients and Adam); no prompt"
        ),
        *common_mistakes(planned),
    ]
    rows = [{"planner": "this plan", "peak GB": planned.peak_bytes / 1e9, "against ours %": 0.0, "why": "all terms"}]
    for other in others:
        error = 100 * (other.peak_bytes / planned.peak_bytes - 1)
        rows.append(
            {"planner": other.name, "peak GB": other.peak_bytes / 1e9, "against ours %": error, "why": other.why}
        )
    return rows
