"""Measures what holding a group's graphs costs: `python -m workbench.group_study` writes two files of `data/runs/`.

Three ways to the same gradient on the same tiny models: this engine, which replays the responses one at a time; the
same captured prompt with every response's graph held; and conventional autograd, one whole-sequence graph per response,
all held. `group_memory.json` has peaks by group size, `timeline.json` live bytes over one step of each way.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch import Tensor

from workbench import Policy, capture_prompt, load_policy, update_step
from workbench.errors import WorkbenchError
from workbench.memory import MemoryMeter
from workbench.model_sources import tiny_model
from workbench.ops.gated_delta import chunk_gated_delta_rule
from workbench.progress import progress
from workbench.prompt_gradient import add_carry_gradients, needs_boundaries, plan_walk, walk_prompt
from workbench.recordings import RUNS_FOLDER, Recording, save_recording
from workbench.records import provenance
from workbench.replay import Branch
from workbench.state.pages import GradientPages
from workbench.step import GraphCensus
from workbench.walk import walk_segment

FAMILIES = {"qwen3": "tiny dense Qwen3", "qwen3_5": "tiny hybrid Qwen3.5"}
MODES = ("serial_replay", "all_graphs", "conventional")
SCOPES = ("full", "response_only")
COMMAND = "python -m workbench.group_study"
SAMPLES = 90  # of one timeline: the largest of the bytes seen in each slice of the step
LARGEST_DIFFERENCE = 1e-4  # relative L2 between the ways, float32; the recording says what was measured


@dataclass(frozen=True)
class Problem:
    """One group on one tiny model. Every second advantage is negative."""

    family: str
    prompt_tokens: int = 1024
    response_tokens: int = 128
    group_size: int = 4
    chunk_tokens: int = 128
    lora_rank: int = 4

    def policy(self) -> Policy:
        return load_policy(tiny_model(self.family), lora=self.lora_rank)

    def data(self) -> tuple[Tensor, list[Tensor], list[float]]:
        draw = torch.Generator().manual_seed(0)
        prompt = torch.randint(3, 101, (self.prompt_tokens,), generator=draw)
        responses = [torch.randint(3, 101, (self.response_tokens,), generator=draw) for _ in range(self.group_size)]
        return prompt, responses, [1.0 if member % 2 else -1.0 for member in range(self.group_size)]


class GroupParameters(BaseModel):
    """The parameters of notebooks/30_group_serialization.ipynb; an unknown name, or a bad value, is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["qwen3", "qwen3_5"]
    prompt_tokens: int = Field(ge=2)
    response_tokens: PositiveInt
    group_sizes: list[PositiveInt] = Field(min_length=1)
    chunk_tokens: PositiveInt
    lora_rank: PositiveInt

    def problem(self, group_size: int) -> Problem:
        """The group of this size."""
        return Problem(
            self.family, self.prompt_tokens, self.response_tokens, group_size, self.chunk_tokens, self.lora_rank
        )


# --- three ways to one gradient ----------------------------------------------------------------------------------


def run_step(policy: Policy, problem: Problem, mode: str, scope: str, meter: MemoryMeter) -> None:
    """One step without an optimizer, measured by `meter`; leaves the gradient in `.grad`."""
    prompt, responses, advantages = problem.data()
    if mode == "serial_replay":
        update_step(
            policy,
            prompt,
            responses,
            advantages=advantages,
            gradient_scope=scope,
            chunk_tokens=problem.chunk_tokens,
            block_tokens=problem.response_tokens,
            measure_memory=meter,
        )
        return
    with meter:
        meter.adopt("weights", policy.model.parameters())
        if mode == "conventional":
            _conventional_step(policy, prompt, responses, advantages, meter)
        else:
            _all_graphs_step(policy, problem, scope, meter)


def _conventional_step(
    policy: Policy, prompt: Tensor, responses: Sequence[Tensor], advantages: Sequence[float], meter: MemoryMeter
) -> None:
    """One graph over prompt and response for every member, one backward at the end."""
    losses, census = [], GraphCensus()
    with meter.stage("forward"):
        for response, advantage in zip(responses, advantages, strict=True):
            ids = torch.cat([prompt, response])[None]
            logits = policy.model(input_ids=ids, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
            logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, response[:, None])[:, 0]
            losses.append(-(advantage * torch.exp(logprobs - logprobs.detach())).mean() / len(responses))
            census.register(losses[-1])
    with meter.stage("backward"):
        total = torch.stack(losses).sum()
        total.backward()


def _all_graphs_step(policy: Policy, problem: Problem, scope: str, meter: MemoryMeter) -> None:
    """This engine's step, but with every response's graph held until all are there."""
    prompt, responses, advantages = problem.data()
    census = GraphCensus()
    with meter.stage("capture"):
        state = capture_prompt(
            policy, prompt, chunk_tokens=problem.chunk_tokens, keep_boundaries=needs_boundaries(scope), meter=meter
        )
    plan = plan_walk(scope, state)
    pages = GradientPages(lambda start: plan.wants(start, state.positions), lambda: meter.ledger("gradient_pages"))
    with policy.active():
        with meter.stage("replay"):
            held = []
            for member, ids in enumerate(responses):
                branch = Branch(policy, state, ids, member, problem.response_tokens, 1.0, pages, meter=meter)
                logprobs, _, live = branch.sweep_forward(keep_last_graph=True)
                assert live is not None
                census.register(live.output.hidden)
                held.append((branch.segments[0], logprobs, live))
            carry = None
            for (segment, logprobs, live), advantage in zip(held, advantages, strict=True):
                weights = torch.full_like(logprobs, -advantage / (len(responses) * len(logprobs)))
                found = walk_segment(policy, segment, live, pages, None, coefficients=weights, meter=meter)
                carry = add_carry_gradients(carry, found)
            del held, live
        with meter.stage("prompt_gradient"):
            walk_prompt(
                policy, state, plan, pages, carry, checkpoint_layers=False, meter=meter, on_graph=census.register
            )


@contextmanager
def linear_kernel(policy: Policy) -> Iterator[None]:
    """Gives transformers' Gated DeltaNet this package's kernel: its own reference kernel would make it look worse."""
    model: Any = policy.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    modeling = sys.modules[type(base).__module__]
    name = "torch_chunk_gated_delta_rule"
    with mock.patch.object(modeling, name, chunk_gated_delta_rule) if hasattr(modeling, name) else mock.MagicMock():
        yield


# --- peaks by group size -----------------------------------------------------------------------------------------


def group_memory_rows(
    problems: Sequence[Problem], sizes: Sequence[int], differences: list[float]
) -> Iterator[dict[str, Any]]:
    """One row per model, way, scope and group size; the ways' relative L2 differences are added to `differences`.

    Raises WorkbenchError if the ways' gradients differ.
    """
    cases = [
        (Problem(p.family, p.prompt_tokens, p.response_tokens, size, p.chunk_tokens, p.lora_rank), scope)
        for p in problems
        for size in sizes
        for scope in SCOPES
    ]
    for problem, scope in progress(cases, "group sizes", unit="step"):
        policy, gradients = problem.policy(), []
        for mode in MODES if scope == "full" else MODES[:2]:
            policy.model.zero_grad(set_to_none=True)
            meter = MemoryMeter()
            started = time.process_time()
            with linear_kernel(policy):
                run_step(policy, problem, mode, scope, meter)
            seconds = time.process_time() - started
            gradients.append(
                torch.cat([p.grad.flatten() for _, p in policy.trainable_parameters() if p.grad is not None])
            )
            yield {
                "model": FAMILIES[problem.family],
                "mode": mode,
                "scope": scope,
                "prompt_tokens": problem.prompt_tokens,
                "response_tokens": problem.response_tokens,
                "group_size": problem.group_size,
                "state_bytes": _state_bytes(policy, problem),
                "peak_bytes": meter.report()["peak_bytes"],
                "step_seconds": round(seconds, 4),
            }
        differences += _differences(gradients, problem, scope)


def _state_bytes(policy: Policy, problem: Problem) -> int:
    return capture_prompt(policy, problem.data()[0], chunk_tokens=problem.chunk_tokens).nbytes


def _differences(gradients: Sequence[Tensor], problem: Problem, scope: str) -> list[float]:
    first = gradients[0].double()
    found = [float((other.double() - first).norm() / first.norm()) for other in gradients[1:]]
    if not max(found) <= LARGEST_DIFFERENCE:
        raise WorkbenchError(f"{problem}, {scope}: the ways' gradients differ by {max(found):.2e} (relative L2)")
    return found


# --- one step over time ------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """Live bytes after every tensor operation of one step; a `MemoryMeter` watcher."""

    started: float = field(default_factory=time.perf_counter)
    samples: list[tuple[float, str, int, dict[str, int], int]] = field(default_factory=list)
    position: int = 0
    census: GraphCensus | None = None

    def __call__(self, meter: MemoryMeter) -> None:
        graphs = 0 if self.census is None else self.census.alive
        seconds = time.perf_counter() - self.started
        self.samples.append((seconds, meter.open_stage, self.position, meter.live_bytes(), graphs))

    @contextmanager
    def follow(self, policy: Policy) -> Iterator[None]:
        """Notes where in the sequence each segment starts, and which census counts the step's graphs."""
        forward, register = policy.adapter.forward_chunk, GraphCensus.register

        def noted_forward(ids: Tensor, context: Any, **options: Any) -> Any:
            self.position = context.start
            return forward(ids, context, **options)

        def noted_register(census: GraphCensus, output: Tensor) -> None:
            self.census = census
            register(census, output)

        with (
            mock.patch.object(policy.adapter, "forward_chunk", noted_forward),
            mock.patch.object(GraphCensus, "register", noted_register),
        ):
            yield

    def slices(self, count: int) -> list[tuple[float, str, int, dict[str, int], int]]:
        """The sample with the most live bytes in each of `count` equal slices of the step's time."""
        end = self.samples[-1][0]
        best: dict[int, Any] = {}
        for sample in self.samples:
            slot = min(count - 1, int(count * sample[0] / end))
            if slot not in best or _above_start(sample[3]) > _above_start(best[slot][3]):
                best[slot] = sample
        return [best[slot] for slot in sorted(best)]


def _above_start(ledgers: dict[str, int]) -> int:
    return sum(size for name, size in ledgers.items() if name != "weights")


def timeline_rows(problem: Problem, samples: int = SAMPLES) -> Iterator[dict[str, Any]]:
    """Samples of one step of each way and scope; the ways that hold all graphs as one total."""
    for scope, mode in [(s, m) for s in SCOPES for m in (MODES if s == "full" else MODES[:2])]:
        policy = problem.policy()
        with linear_kernel(policy):
            run_step(policy, problem, mode, scope, MemoryMeter())  # warm: kernels are loaded, caches filled
            policy.model.zero_grad(set_to_none=True)
            trace = Trace()
            with trace.follow(policy):
                run_step(policy, problem, mode, scope, MemoryMeter(watcher=trace))
        row: Any = partial(dict, model=FAMILIES[problem.family], mode=mode, scope=scope)
        for seconds, stage, position, ledgers, graphs in trace.slices(samples):
            shown = {name: size for name, size in ledgers.items() if name != "weights"}
            for ledger, size in (shown if mode == "serial_replay" else {"total": sum(shown.values())}).items():
                yield row(
                    stage=stage, position=position, seconds=round(seconds, 5), ledger=ledger, live_bytes=size,
                    graphs_alive=graphs,
                )  # fmt: skip


# --- for the notebook --------------------------------------------------------------------------------------------


def measure_groups(parameters: GroupParameters) -> tuple[Recording, float]:
    """Peaks by way, scope and group size on this machine, and the largest difference between the ways' gradients."""
    differences: list[float] = []
    problem = parameters.problem(max(parameters.group_sizes))
    rows = list(group_memory_rows([problem], sorted(set(parameters.group_sizes)), differences))
    return _recording("group_memory", "Peak memory against group size", rows), max(differences)


def measure_timeline(parameters: GroupParameters) -> Recording:
    """Live bytes over one step of the largest group, each way."""
    rows = list(timeline_rows(parameters.problem(max(parameters.group_sizes))))
    return _recording("timeline", "Live bytes over one step", rows)


def _recording(kind: str, title: str, rows: list[dict[str, Any]]) -> Recording:
    return Recording(
        kind=kind, origin="measured", title=title, command="this notebook", rows=rows, provenance=provenance()
    )


def group_results(parameters: GroupParameters, recording: Recording, difference: float) -> dict[str, Any]:
    """What the run's record keeps: peaks by way, scope and group size, and the check of the ways against each other."""
    peaks: dict[str, dict[str, dict[str, int]]] = {}
    for row in recording.rows:
        by_size = peaks.setdefault(row["mode"], {}).setdefault(row["scope"], {})
        by_size[str(row["group_size"])] = row["peak_bytes"]
    checks = [
        {"level": 1, "what": "executed", "passed": True},
        {
            "level": 4,
            "what": "relative L2 between the ways, full scope against conventional autograd among them",
            "measured": difference,
            "bound": LARGEST_DIFFERENCE,
            "passed": difference <= LARGEST_DIFFERENCE,
        },
    ]
    level = 4 if difference <= LARGEST_DIFFERENCE else 1
    return {
        "seed": 0,
        "settings": parameters.model_dump(),
        "memory": {"peak_bytes_by_way": peaks},
        "evidence": {"level": level, "checks": checks},
    }


def growth_rows(recording: Recording) -> list[list[Any]]:
    """Peak of the smallest and of the largest group of each way and scope, and the growth in per cent."""
    rows = []
    for mode in recording.values("mode"):
        for scope in recording.values("scope"):
            found = sorted(recording.select(mode=mode, scope=scope), key=lambda row: row["group_size"])
            if found:
                first, last = found[0]["peak_bytes"], found[-1]["peak_bytes"]
                rows.append([mode.replace("_", " "), scope, first / 1e6, last / 1e6, 100 * (last / first - 1)])
    return rows


# --- command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes group_memory.json and timeline.json; about a minute on one core."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=RUNS_FOLDER, help="where the recordings go")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    problems = [Problem(family) for family in FAMILIES]
    about = "P = 1,024, R = 128, chunks of 128, LoRA r4, float32; random weights; bytes above the weights"
    differences: list[float] = []
    rows = list(group_memory_rows(problems, (1, 2, 4, 8, 16), differences))
    save_recording(
        options.folder / "group_memory.json",
        "group_memory",
        rows,
        title="Peak memory against group size",
        command=COMMAND,
        notes=[
            about,
            "step_seconds: CPU seconds, one run, the meter's own cost included",
            f"the ways' gradients agree within {max(differences):.1e} (relative L2)",
        ],
    )
    save_recording(
        options.folder / "timeline.json", "timeline", timeline_rows(Problem("qwen3_5")),
        title="Live bytes over one step", command=COMMAND,
        notes=[about + ", G = 4", f"the largest of each of {SAMPLES} slices; seconds include the meter's own cost"],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
