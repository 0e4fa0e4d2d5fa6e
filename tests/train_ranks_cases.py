"""What tests/test_train_ranks.py runs inside real ranks: training runs over a mesh, against the same run alone."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState

from tests.helpers import device, train_adapter
from workbench import (
    ObjectiveConfig,
    Policy,
    RefreshPolicy,
    TrainConfig,
    evaluate,
    load_policy,
    sample_responses,
    train,
)
from workbench.comm import Mesh, every_value
from workbench.errors import WorkbenchError
from workbench.model_sources import ByteTokenizer, tiny_model
from workbench.parallel import gather_experts, open_mesh, shard_experts
from workbench.replicas import require_same_parameters
from workbench.train_metrics import MEASURED

TASKS = [{"prompt": f"Key {i} opens door {7 * i % 10}." + " Say." * i, "answer": "aeiou 0123"} for i in range(5)]
MICRO = {
    "vocab_size": 259, "eos_token_id": 257, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2,
}  # fmt: skip
HYBRID = {"vocab_size": 259, "eos_token_id": 257, "num_hidden_layers": 2}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
Metrics = list[dict[str, Any]]


def policy_of(kind: str) -> Policy:
    """A float64 policy of few parameters; LoRA policies have B away from zero."""
    families: dict[str, tuple[str, dict[str, Any]]] = {
        "hybrid": ("qwen3_5", {**HYBRID, **LAYERS}),
        "experts": ("qwen3_5_moe", {**HYBRID, **LAYERS, "num_experts": 4}),
    }
    family, sizes = families.get(kind, ("llama", MICRO))
    options: dict[str, Any] = {}
    if kind in ("lora", "frozen"):
        options = {"lora": 2, "adapter_scope": "replay" if kind == "frozen" else "all"}
    policy = load_policy(tiny_model(family, 3, **sizes).to(device(), torch.float64), dtype=torch.float64, **options)
    if options:
        train_adapter(policy.model)
    policy.tokenizer = ByteTokenizer()
    return policy


def some_flat(completions: list[str], answer: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
    """The first group of every step is all equal, one member of the last has no reward; the others vary."""
    rewards: list[float | None] = [0.1 * i + len(text) / 50 for i, text in enumerate(completions)]
    if trainer_state.global_step is not None:
        rewards[:2] = [1.0, 1.0]
        rewards[-1] = None if trainer_state.global_step % 2 else 0.0
    return rewards


def varying(completions: list[str], **_: Any) -> list[float]:
    return [float(place) for place, _ in enumerate(completions)]


def flat(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def config_of(**options: Any) -> TrainConfig:
    small: dict[str, Any] = {
        "num_steps": 2, "prompts_per_step": 4, "group_size": 2, "max_new_tokens": 4, "chunk_tokens": 16,
        "learning_rate": 1e-2, "measure_memory": False,
    }  # fmt: skip
    return TrainConfig(**small | options)


def run_of(
    policy: Policy, mesh: Mesh | None, rewards: Any, config: TrainConfig, tasks: Any = TASKS, **options: Any
) -> dict[str, Any]:
    """Metrics and evaluations of a run, without what is measured."""
    record = train(policy, tasks, rewards, config=config, comm=mesh, **options)
    results = record.results
    if config.output_dir is not None:
        folder = Path(config.output_dir)
        results = {"metrics": read_lines(folder / "metrics.jsonl"), "evaluations": []}
    return {name: [comparable(line) for line in results[name]] for name in ("metrics", "evaluations")}


def comparable(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in MEASURED}


def read_lines(path: Path) -> Metrics:
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences(found: Any, truth: Any, place: str = "") -> list[str]:
    """Where two JSON values differ; floats may by 1e-9 of their size or 1e-12."""
    if isinstance(found, float) and isinstance(truth, float):
        return [] if math.isclose(found, truth, rel_tol=1e-9, abs_tol=1e-12) else [f"{place}: {found!r}, not {truth!r}"]
    if isinstance(found, dict) and isinstance(truth, dict):
        keys = found.keys() | truth.keys()
        return [d for key in sorted(keys) for d in differences(found.get(key), truth.get(key), f"{place}.{key}")]
    if isinstance(found, list) and isinstance(truth, list) and len(found) == len(truth):
        pairs = zip(found, truth, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{place}[{i}]")]
    return [] if found == truth else [f"{place}: {found!r}, not {truth!r}"]


# ---------------------------------------------------------------- the same run


def same_run(
    world: Any,
    kind: str,
    *,
    rewards: Any = some_flat,
    dp: int,
    ep: int = 1,
    evaluates: bool = False,
    num_tasks: int = len(TASKS),
    **options: Any,
) -> dict[str, Any]:
    """The run over the mesh, its replicas, and on rank 0 the same run alone: how far weights and lines are apart."""
    mesh, config, policy = world.mesh(dp=dp, ep=ep), config_of(**options), policy_of(kind)
    given: dict[str, Any] = {"tasks": TASKS[:num_tasks]} | ({"eval_tasks": TASKS[:3]} if evaluates else {})
    if ep > 1:
        shard_experts(policy.adapter.causal_lm, mesh)
    before = {name: p.detach().clone() for name, p in policy_of(kind).trainable_parameters()}
    calls = mesh.traffic()
    found = run_of(policy, mesh, rewards, config, **given)
    summed = mesh.traffic().since(calls)["gradient presence"]["calls"]
    require_same_parameters(policy.trainable_parameters(), mesh, "weights after the run")
    everyone = every_value(mesh.world, found, device(), tag="test")
    measured = {
        "lines_of_ranks_differ": sum(lines != found for lines in everyone),
        "sums": summed,
        "updates": len(found["metrics"]),
    }
    after = {name: p.detach() for name, p in policy.trainable_parameters()}
    after = gather_experts(after, policy.adapter.causal_lm, mesh)
    if not world.first:
        return measured
    alone = policy_of(kind)
    truth = run_of(alone, None, rewards, config, **given)
    moved = {name: p.detach() - before[name] for name, p in alone.trainable_parameters()}
    apart = {name: (after[name] - before[name]) - step for name, step in moved.items()}
    total = math.sqrt(sum(float(step.square().sum()) for step in moved.values()))
    return measured | {
        "moved": total,
        "apart": math.sqrt(sum(float(d.square().sum()) for d in apart.values())),
        "differences": differences(found, truth),
        "skipped": [line["num_skipped_groups"] for line in truth["metrics"]],
        "ages": [line["state_ages"] for line in truth["metrics"]],
        "notes": [note for line in found["metrics"] for note in line["notes"]],
        "decisions": [why for line in found["metrics"] for why in line["state_decisions"]],
    }


def resumed(world: Any, dp: int) -> dict[str, Any]:
    """A run killed after step 2's checkpoint, with lines of later steps on disk, against one that nobody disturbed."""
    mesh = world.mesh(dp=dp)
    folder = Path(every_value(mesh.world, tempfile.mkdtemp() if world.first else "", device(), tag="test")[0])
    options: dict[str, Any] = {
        "num_steps": 4, "checkpoint_every": 1, "keep_checkpoints": 9, "updates_per_batch": 2, "resume": True,
        "lr_scheduler_type": "cosine",
    }  # fmt: skip
    undisturbed = policy_of("llama")
    lines = run_of(undisturbed, mesh, some_flat, config_of(output_dir=folder / "whole", **options))
    if world.first:
        shutil.copytree(folder / "whole", folder / "killed")
        for late in ("step-00000003", "step-00000004"):
            shutil.rmtree(folder / "killed" / "checkpoints" / late)
        (folder / "killed" / "checkpoints" / ".writing-00000003").mkdir()
    every_value(mesh.world, 0, device(), tag="test")
    policy = policy_of("llama")
    again = run_of(policy, mesh, some_flat, config_of(output_dir=folder / "killed", **options))
    equal = [torch.equal(a, b) for a, b in zip(weights(policy), weights(undisturbed), strict=True)]
    record = json.loads((folder / "killed" / "run.json").read_text())
    checkpoints = sorted(path.name for path in (folder / "killed" / "checkpoints").iterdir())
    every_value(mesh.world, 0, device(), tag="test")  # all have read before rank 0 goes on in the same folder
    alone = policy_of("llama")
    if world.first:  # the same folder, gone on with on one process
        last = [folder / "killed" / "checkpoints" / f"step-0000000{step}" for step in (3, 4)]
        for late in last:
            shutil.rmtree(late)
        run_of(alone, None, some_flat, config_of(output_dir=folder / "killed", **options))
    near = max(float((a - b).abs().max()) for a, b in zip(weights(alone), weights(undisturbed), strict=True))
    return {
        "bitwise": all(equal),
        "lines_equal": lines == again,
        "num_lines": len(again["metrics"]),
        "status": record["status"],
        "ranks": record["results"]["ranks"],
        "checkpoints": checkpoints,
        "on_one_process": near,
    }


def weights(policy: Policy) -> list[torch.Tensor]:
    return [p.detach() for _, p in policy.trainable_parameters()]


def evaluation(world: Any, dp: int) -> dict[str, Any]:
    options: dict[str, Any] = {"num_samples": 2, "max_new_tokens": 4, "chunk_tokens": 16}
    found = evaluate(policy_of("hybrid"), TASKS, varying, comm=world.mesh(dp=dp), **options)
    truth = evaluate(policy_of("hybrid"), TASKS, varying, **options) if world.first else found
    return {"equal": found == truth, "num_responses": found["num_responses"]}


# ---------------------------------------------------------------- refusals


def refused(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        call()
    except WorkbenchError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def other_tasks(world: Any) -> dict[str, Any]:
    tasks = TASKS[:3] if world.first else TASKS[:4]
    return refused(lambda: train(policy_of("llama"), tasks, varying, config=config_of(), comm=world.plain))


def other_seed(world: Any) -> dict[str, Any]:
    config = config_of(seed=int(world.first))
    return refused(lambda: train(policy_of("llama"), TASKS, varying, config=config, comm=world.plain))


def other_weights(world: Any) -> dict[str, Any]:
    policy = policy_of("llama")
    if not world.first:
        with torch.no_grad():
            policy.model.model.norm.weight[0] += 1e-12
    return refused(lambda: train(policy, TASKS, varying, config=config_of(), comm=world.plain))


def evaluated_other_tasks(world: Any) -> dict[str, Any]:
    tasks = TASKS[:3] if world.first else TASKS[:4]
    return refused(lambda: evaluate(policy_of("llama"), tasks, varying, num_samples=2, comm=world.plain))


def evaluated_other_seed(world: Any) -> dict[str, Any]:
    seed = int(world.first)
    return refused(lambda: evaluate(policy_of("llama"), TASKS, varying, num_samples=2, seed=seed, comm=world.plain))


def too_few_prompts(world: Any) -> dict[str, Any]:
    config = config_of(prompts_per_step=1)
    return refused(lambda: train(policy_of("llama"), TASKS, varying, config=config, comm=world.mesh(dp=2)))


def frozen_prompt(world: Any) -> dict[str, Any]:
    return refused(lambda: train(policy_of("frozen"), TASKS, varying, config=config_of(), comm=world.plain))


def experts_on_disk(world: Any) -> dict[str, Any]:
    mesh, policy = world.mesh(ep=2), policy_of("experts")
    shard_experts(policy.adapter.causal_lm, mesh)
    config = config_of(output_dir="nowhere")
    return refused(lambda: train(policy, TASKS, varying, config=config, comm=mesh))


def not_a_mesh(world: Any) -> dict[str, Any]:
    comm: Any = 2
    return refused(lambda: train(policy_of("llama"), TASKS, varying, config=config_of(), comm=comm))


REFUSALS = (
    other_tasks, other_seed, other_weights, evaluated_other_tasks, evaluated_other_seed, too_few_prompts, frozen_prompt,
    experts_on_disk, not_a_mesh,
)  # fmt: skip


# ---------------------------------------------------------------- accelerate


def prepared(world: Any) -> dict[str, Any]:
    """What accelerate makes of an optimizer steps as the optimizer does."""
    mesh = world.plain
    results = []
    for prepare in (mesh.prepare_optimizer, lambda optimizer: optimizer):
        parameter = torch.nn.Parameter(torch.arange(4.0))
        optimizer = prepare(torch.optim.AdamW([parameter], lr=0.1))
        for _ in range(3):
            parameter.grad = parameter.detach() ** 2 + 1.0
            optimizer.step()
        results.append((type(optimizer).__name__, parameter.detach()))
    return {"name": results[0][0], "equal": torch.equal(results[0][1], results[1][1])}


def accelerate_settings(world: Any) -> dict[str, Any]:
    """What `accelerate launch` may have put into the environment and no engine could honour."""
    settings = {
        "bf16": {"ACCELERATE_MIXED_PRECISION": "bf16"},
        "fp16": {"ACCELERATE_MIXED_PRECISION": "fp16"},
        "accumulation": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        "dynamo": {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
        "fsdp": {"ACCELERATE_USE_FSDP": "true"},
    }
    found = {}
    for name, environment in settings.items():
        _forget_accelerate()
        with mock.patch.dict(os.environ, environment):
            found[name] = refused(open_mesh)["error"]
    _forget_accelerate()
    open_mesh()
    return found


def _forget_accelerate() -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()


# ---------------------------------------------------------------- a launch of its own


def killed_in_training(folder: str) -> None:
    """Rank 1 is killed in the second step, while rank 0 samples and then waits for it."""
    mesh = open_mesh(dp=2, timeout_seconds=60)
    steps: list[Any] = []

    def sample(*args: Any, **options: Any) -> Any:
        steps.append(None)
        if mesh.world.rank == 1 and len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample_responses(*args, **options)

    with mock.patch.object(sys.modules["workbench.train"], "sample_responses", sample):
        config = config_of(num_steps=50, prompts_per_step=2, output_dir=folder, checkpoint_every=1)
        train(policy_of("llama"), TASKS, varying, config=config, comm=mesh)


# ---------------------------------------------------------------- all of them


def cases(world: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    found: dict[str, Callable[[], dict[str, Any]]] = {}

    def same(name: str, kind: str, dp: int, **options: Any) -> None:
        found[f"train: {name}"] = partial(same_run, world, kind, dp=dp, **options)

    off_policy = {"updates_per_batch": 2, "temperature": 0.7, "objective": ObjectiveConfig(advantage_scale="batch")}
    drift = {
        "refresh": RefreshPolicy(max_logprob_drift=2.0), "gradient_scope": "response_only", "num_steps": 3,
        "num_tasks": 2, "prompts_per_step": 2,
    }  # fmt: skip
    if world.size == 2:
        same("data ranks", "hybrid", 2, evaluates=True, eval_every=1, prompts_per_step=3, **off_policy)
        same("context ranks", "hybrid", 1, evaluates=True, eval_every=2, prompts_per_step=2, **off_policy)
        same("a data rank without a group to learn from", "llama", 2, prompts_per_step=2)
        same("nothing to learn", "llama", 2, rewards=flat)
        same("no state is held", "llama", 1, state_placement="recapture", prompts_per_step=2)
        same("states on the host", "llama", 1, state_placement="host", prompts_per_step=2, checkpoint_layers=True)
        same("reused states", "llama", 2, refresh=3, gradient_scope="response_only", num_steps=4, kept_states=3)
        same("drift rule, data ranks", "llama", 2, rewards=varying, **drift)
        same("drift rule, context ranks", "llama", 1, rewards=varying, **drift)
        same("frozen prompts", "frozen", 2, rewards=varying)
        same("LoRA with a reference", "lora", 1, prompts_per_step=2, num_steps=1, objective=ObjectiveConfig(beta=0.1))
        same("experts spread", "experts", 1, ep=2, prompts_per_step=2, num_steps=1, rewards=varying)
        found["train resumes: data ranks"] = partial(resumed, world, 2)
        found["train evaluates: data ranks"] = partial(evaluation, world, 2)
        found["train evaluates: context ranks"] = partial(evaluation, world, 1)
        for refusal in REFUSALS:
            found[f"train refuses: {refusal.__name__}"] = partial(refusal, world)
        found["accelerate: prepared"] = partial(prepared, world)
        found["accelerate: settings"] = partial(accelerate_settings, world)
    if world.size == 4:
        same("data x context ranks", "hybrid", 2, prompts_per_step=3, **off_policy)
        same("four data ranks", "llama", 4, updates_per_batch=2)
        found["train resumes: data x context ranks"] = partial(resumed, world, 2)
    return found
