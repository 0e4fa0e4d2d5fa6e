"""What notebooks/60_many_ranks.ipynb does between its prose: one step over ranks, and what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from workbench import ObjectiveConfig, Policy, capture_prompt, update_step
from workbench.comm import Mesh
from workbench.launch import Launch, launch
from workbench.model_sources import tiny_model
from workbench.planner import plan
from workbench.replicas import family_of, require_same_parameters
from workbench.types import StepReport

MODELS = ("qwen3", "gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_next", "glm_moe_dsa", "deepseek_v32")
LEDGERS = ("rows", "carry", "gradient_pages", "graph", "logits", "gradients")
# Compared with the plan to the byte or an upper bound: they follow from the configuration alone.
PLANNED = {"rows": ("rows",), "carry": ("carry", "boundary_carries"), "gradient_pages": ("gradient_pages",)}
VOCABULARY = 101
KIB = 1024


class RanksParameters(BaseModel):
    """The parameters of notebooks/60_many_ranks.ipynb; an unknown name, or a value that does not fit, is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: int = Field(ge=2)
    expert_ranks: PositiveInt
    model: Literal["qwen3", "gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_next", "glm_moe_dsa", "deepseek_v32"]
    prompt_tokens: PositiveInt
    group_size: int = Field(ge=2)
    response_tokens: PositiveInt
    chunk_tokens: PositiveInt
    gradient_scope: Literal["full", "response_only"]
    num_steps: PositiveInt
    seed: int = Field(ge=0)

    @model_validator(mode="after")
    def _experts_divide(self) -> RanksParameters:
        if self.ranks % self.expert_ranks:
            raise ValueError(f"expert_ranks={self.expert_ranks} must divide ranks={self.ranks}")
        if self.expert_ranks > 1 and self.model in ("qwen3", "gemma3", "qwen3_5"):
            raise ValueError(f"expert_ranks={self.expert_ranks}: {self.model} has no routed experts; use 1")
        return self


# ---------------------------------------------------------------- what every rank runs


def rank_step(**values: Any) -> dict[str, Any]:
    """A step without an optimizer, compared with one process on rank 0; then num_steps of AdamW, compared over ranks.

    The function that `run_ranks` launches. Float32, random weights; float32 gradients are compared in float64.
    """
    from workbench.parallel import gather_experts, open_mesh, shard_experts

    parameters = RanksParameters(**values)
    mesh = open_mesh(ep=parameters.expert_ranks)
    policy = _policy(parameters)
    freed = shard_experts(policy.adapter.causal_lm, mesh)
    state = capture_prompt(
        policy, _prompt(parameters), chunk_tokens=min(parameters.chunk_tokens, parameters.prompt_tokens), comm=mesh
    )
    inventory = state.inventory()
    del state
    report = _step(policy, parameters, mesh)
    gradient = {name: p.grad for name, p in policy.trainable_parameters() if p.grad is not None}
    gradient = gather_experts(gradient, policy.adapter.causal_lm, mesh)
    policy.model.zero_grad(set_to_none=True)
    found = {
        "rank": mesh.world.rank,
        "loss": report.loss,
        "level": report.level,
        "memory": {name: value for name, value in report.memory.items() if isinstance(value, int)},
        "seconds": dict(report.seconds),
        "inventory": inventory,
        "expert_bytes_elsewhere": freed,
        "communication": report.counters["communication"],
        "reduction": report.counters["gradient_reduction"],
    }
    if mesh.world.rank == 0:
        found["parity"] = _parity(parameters, report, gradient)
    return found | {"updates": _updates(policy, parameters, mesh)}


def _policy(parameters: RanksParameters) -> Policy:
    return Policy(tiny_model(parameters.model, parameters.seed))


def _prompt(parameters: RanksParameters) -> torch.Tensor:
    return _draw(parameters.prompt_tokens, parameters.seed)


def _draw(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def _step(policy: Policy, parameters: RanksParameters, comm: Mesh | None, **options: Any) -> StepReport:
    """A step with the token-mean loss over unequal responses, whose value at ratio 1 is not 0 by definition."""
    size, longest = parameters.group_size, parameters.response_tokens
    responses = [_draw(max(1, longest - member), parameters.seed + 1 + member) for member in range(size)]
    return update_step(
        policy,
        _prompt(parameters),
        responses,
        rewards=[float(member % 2) + 0.1 * member for member in range(size)],
        objective=ObjectiveConfig(loss="dapo"),
        gradient_scope=parameters.gradient_scope,
        chunk_tokens=parameters.chunk_tokens,
        comm=comm,
        **options,
    )


def _parity(parameters: RanksParameters, report: StepReport, gradient: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The same step on one process: its memory, and how far this gradient is from its own."""
    policy = _policy(parameters)
    alone = _step(policy, parameters, None)
    truth = {name: p.grad for name, p in policy.trainable_parameters() if p.grad is not None}
    total = sum(float(g.double().square().sum()) for g in truth.values()) ** 0.5
    families: dict[str, float] = {}
    for name, right in truth.items():
        difference = float((gradient[name].double() - right.double()).norm())
        scale = max(float(right.double().norm()), 1e-3 * total)
        families[family_of(name)] = max(families.get(family_of(name), 0.0), difference / scale)
    return {
        "loss_difference": abs(report.loss - alone.loss),
        "same_parameters": sorted(gradient) == sorted(truth),
        "relative_l2": sum(float((gradient[n].double() - g.double()).square().sum()) for n, g in truth.items()) ** 0.5
        / total,
        "by_family": families,
        "memory": {name: value for name, value in alone.memory.items() if isinstance(value, int)},
    }  # fmt: skip


def _updates(policy: Policy, parameters: RanksParameters, mesh: Mesh) -> dict[str, Any]:
    """AdamW steps; update_step itself compares the replicas' bits after each, and raises if they differ."""
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable_parameters()], lr=1e-3)
    before = mesh.world.calls["replica hashes"]
    for _ in range(parameters.num_steps):
        _step(policy, parameters, mesh, optimizer=optimizer, measure_memory=False)
    require_same_parameters(policy.trainable_parameters(), mesh, "weights after the last update")
    return {"steps": parameters.num_steps, "comparisons": mesh.world.calls["replica hashes"] - before}


# ---------------------------------------------------------------- what the notebook does with it


@dataclass(frozen=True)
class RanksRun:
    """One launch: what every rank measured, and what the plan says of one rank."""

    parameters: RanksParameters
    launch: Launch
    planned: Mapping[str, int]

    @property
    def ranks(self) -> Sequence[Mapping[str, Any]]:
        return self.launch.values

    @property
    def parity(self) -> Mapping[str, Any]:
        return self.launch.values[0]["parity"]


def run_ranks(parameters: RanksParameters) -> RanksRun:
    """Launch the ranks and wait for them; the first failing rank's own error is raised."""
    done = launch("workbench.ranks_study:rank_step", parameters.model_dump(), ranks=parameters.ranks)
    return RanksRun(parameters, done, planned_bytes(parameters))


def planned_bytes(parameters: RanksParameters) -> dict[str, int]:
    """The planner's bytes of one rank, by ledger: the largest of any phase. From the configuration alone."""
    config = _policy(parameters).adapter.config.to_dict()
    planned = plan(
        config,
        "H200",  # bytes do not depend on it
        positions=parameters.prompt_tokens + parameters.response_tokens,
        group_size=parameters.group_size,
        response_tokens=parameters.response_tokens,
        context_parallel=parameters.ranks,
        expert_parallel=parameters.expert_ranks,
        gradient_scope=parameters.gradient_scope,
        chunk_tokens=parameters.chunk_tokens,
        weights="fp32",
        training="full",
        optimizer="none",
    )
    return {
        ledger: max(sum(phase.get(term, 0) for term in terms) for phase in planned.terms.values())
        for ledger, terms in PLANNED.items()
    }


PARITY_HEADINGS = ("parameter family", "largest difference", "summed over ranks", "ranks with a gradient")


def parity_rows(run: RanksRun) -> list[list[Any]]:
    """Every family of parameters: distance from one process, and how its gradient came together."""
    audit = run.ranks[0]["reduction"]
    return [
        [family, error, audit[family]["summed_over"], audit[family]["ranks_with_gradient"]]
        for family, error in sorted(run.parity["by_family"].items(), key=lambda item: -item[1])
    ]


MEMORY_HEADINGS = ("ledger", "one process, KiB", "ranks, KiB", "planned for one rank, KiB", "most / planned")


def memory_rows(run: RanksRun) -> list[list[Any]]:
    """Peak bytes by ledger: one process, every rank, and the plan where it has a figure from the configuration."""
    rows = []
    for ledger in LEDGERS:
        ranks = [rank["memory"].get(ledger, 0) for rank in run.ranks]
        planned = run.planned.get(ledger, 0)
        rows.append([
            ledger,
            run.parity["memory"].get(ledger, 0) / KIB,
            ", ".join(f"{value / KIB:,.1f}" for value in ranks),
            planned / KIB if planned else "-",
            max(ranks) / planned if planned else "-",
        ])  # fmt: skip
    return rows


TRAFFIC_HEADINGS = ("what for", "calls", "KiB sent by rank 0", "KiB sent by the busiest rank")


def traffic_rows(run: RanksRun) -> list[list[Any]]:
    """Communication of the step by purpose, the largest first."""
    return [
        [
            purpose,
            entry["calls"],
            entry["bytes"] / KIB,
            max(rank["communication"].get(purpose, entry)["bytes"] for rank in run.ranks) / KIB,
        ]
        for purpose, entry in sorted(run.ranks[0]["communication"].items(), key=lambda item: -item[1]["bytes"])
    ]


def ranks_results(run: RanksRun) -> dict[str, Any]:
    """Everything that the notebook measured, as `workbench.records.save_results` takes it."""
    losses = {rank["loss"] for rank in run.ranks}
    worst = max(run.parity["by_family"].values())
    checks = [
        {"level": 1, "what": "executed", "passed": True},
        {"level": 3, "what": "ranks report the same loss", "passed": len(losses) == 1, "measured": len(losses)},
        {
            "level": 3,
            "what": "gradient of every parameter against one process, of max(own norm, 1e-3 of all)",
            "passed": worst <= 1e-4 and run.parity["same_parameters"],
            "measured": worst,
            "bound": 1e-4,
        },
        {
            "level": 3,
            "what": "replicas bitwise equal after every update",
            "passed": all(rank["updates"]["comparisons"] > 0 for rank in run.ranks),
            "measured": run.ranks[0]["updates"],
        },
    ]
    passed = all(check["passed"] for check in checks)
    return {
        "seed": run.parameters.seed,
        "evidence": {"level": 3 if passed else 1, "checks": checks},
        "settings": run.parameters.model_dump(),
        "world_size": len(run.ranks),
        "planned": run.planned,
        "ranks": run.ranks,
    }
