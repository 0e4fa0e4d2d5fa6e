"""train(): its mathematics against one oracle over the whole batch, its schedule of states, and what it writes.

What a killed run leaves is in test_kill_train.py, agreement with TRL in test_trl_parity.py.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.helpers import float64_arithmetic, token_ids, train_adapter
from workbench import (
    InvalidInputError,
    ObjectiveConfig,
    Policy,
    RefreshPolicy,
    Sampled,
    StepDenominators,
    TrainConfig,
    evaluate,
    load_policy,
    train,
    train_optimizer,
    update_step,
)
from workbench.model_sources import ByteTokenizer, tiny_model
from workbench.train_batch import Batch, task_order
from workbench.train_metrics import MEASURED

train_module = sys.modules["workbench.train"]  # `workbench.train` is the function
LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "luspo")
BOUND = 1e-11  # float64, as in test_gradient_parity.py; measured here <= 6.9e-15
TASKS = [{"prompt": f"Key {i} opens door {7 * i % 10}. Which?" + " Say." * i, "answer": "aeiou 0"} for i in range(5)]
SMALL = {"vocab_size": 259, "eos_token_id": 257, "hidden_size": 32, "num_hidden_layers": 2}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}


def letters(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of characters that stand in the answer, and a little for length: it varies within most groups."""
    return [
        sum(c in right for c in text) / max(1, len(text)) + len(text) / 100
        for text, right in zip(completions, answer, strict=True)
    ]


def in_order(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ in every group, whatever was sampled."""
    return [float(place) for place, _ in enumerate(completions)]


def policy_of(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Policy:
    model = tiny_model(family, **SMALL, **(HYBRID if family == "qwen3_5" else {})).to(dtype)
    policy = load_policy(model, **options)
    policy.tokenizer = ByteTokenizer()
    return policy


def config_of(**options: Any) -> TrainConfig:
    small: dict[str, Any] = {
        "num_steps": 2,
        "prompts_per_step": 2,
        "group_size": 3,
        "max_new_tokens": 5,
        "chunk_tokens": 16,
        "learning_rate": 1e-2,
    }
    return TrainConfig(**small | options)


def lines_of(record: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in record.results["metrics"]]


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.trainable_parameters()}


def same_weights(a: Policy, b: Policy) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights_of(a).values(), weights_of(b).values(), strict=True))


# ---------------------------------------------------------------- mathematics


@pytest.mark.parametrize("loss", LOSSES)
def test_two_prompts_accumulated_are_one_step(loss: str) -> None:
    """Old log-probs away from the new ones, responses and prompts of odd and unequal lengths."""
    model = tiny_model("qwen3_5").double()
    policy = Policy(model)
    prompts = [token_ids(17, 1), token_ids(30, 2)]
    groups = [[token_ids(n, 10 + n) for n in (3, 7)], [token_ids(n, 20 + n) for n in (1, 12, 5)]]
    advantages = [[1.0, -0.5], [0.7, -1.2, 0.3]]
    config = ObjectiveConfig(loss=loss, max_response_tokens=9 if loss == "dr_grpo" else None)
    denominators = StepDenominators.from_lengths(len(r) for group in groups for r in group)
    members: list[oracle.Member] = []
    with float64_arithmetic():
        for prompt, group, values in zip(prompts, groups, advantages, strict=True):
            with torch.no_grad():
                old = [oracle.sequence_logprobs(model, prompt, r) + 0.3 * (-1) ** len(r) for r in group]
            members += zip([prompt] * len(group), group, old, values, strict=True)
            update_step(
                policy,
                prompt,
                group,
                advantages=values,
                objective=config,
                old_logprobs=old,
                denominators=denominators,
                chunk_tokens=8,
                block_tokens=4,
            )
        found = oracle.take_gradients(model)
        assert oracle.relative_l2(found, oracle.objective_gradient(model, members, config)) <= BOUND


def test_denominators_that_cannot_include_the_group_are_refused() -> None:
    policy, prompt, group = Policy(tiny_model("llama")), token_ids(9), [token_ids(3), token_ids(4)]
    for wrong in (StepDenominators(1, 100), StepDenominators(2, 6)):
        with pytest.raises(InvalidInputError, match="cannot include this group of 2 members and 7 tokens"):
            update_step(policy, prompt, group, advantages=[1.0, -1.0], denominators=wrong)
    with pytest.raises(InvalidInputError, match=r"StepDenominators\.from_lengths makes one"):
        update_step(policy, prompt, group, advantages=[1.0, -1.0], denominators=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "scale", "scope"), [("dapo", "batch", "all"), ("gspo", "group", "all"), ("grpo", "none", "replay")]
)
def test_every_update_of_a_run_is_the_oracles(loss: str, scale: str, scope: str, monkeypatch: Any) -> None:
    """Sampling, advantages over the batch, stored old log-probs, accumulation: gradients as the optimizer gets them.

    Two updates per batch, so that the second is off-policy; the run keeps float64 policies on both sides.
    """
    options = {} if scope == "all" else {"lora": 2, "adapter_scope": scope}
    policy = policy_of("qwen3_5", torch.float64, **options)
    if options:
        train_adapter(policy.model)
    batches: list[Batch] = []
    errors: list[float] = []
    make_batch, apply = train_module.make_batch, train_optimizer.apply_gradients

    def spied_batch(*args: Any) -> Batch:
        batches.append(make_batch(*args))
        return batches[-1]

    def checked_apply(policy: Policy, optimizer: Any, **more: Any) -> float:
        found = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
        errors.append(oracle.relative_l2(found, expected_gradient(policy, batches[-1], config)))
        for name, parameter in policy.model.named_parameters():
            parameter.grad = found.get(name)
        return apply(policy, optimizer, **more)

    monkeypatch.setattr(train_module, "make_batch", spied_batch)
    monkeypatch.setattr(train_optimizer, "apply_gradients", checked_apply)
    config = config_of(
        objective=ObjectiveConfig(loss=loss, advantage_scale=scale),
        updates_per_batch=2,
        temperature=0.7,
        learning_rate=1e-4,
    )
    with float64_arithmetic():
        record = train(policy, TASKS, in_order, config=config)
    assert len(errors) == 4
    assert max(errors) <= BOUND
    ratios = [line["ratio_max"] for line in record.results["metrics"]]
    assert ratios[0] == ratios[2] == 1.0
    assert ratios[1] != 1.0
    assert ratios[3] != 1.0


def expected_gradient(policy: Policy, batch: Batch, config: TrainConfig) -> oracle.Gradients:
    rewards = [t if t is not None else math.nan for t in batch.rewards.totals]
    size = config.group_size
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    spread = torch.tensor(rewards).double().std()
    members: list[oracle.Member] = []
    gradients: oracle.Gradients = {}
    for group, values in zip(batch.groups, groups, strict=True):
        centred = torch.tensor(values).double() - torch.tensor(values).double().mean()
        by = {"batch": spread, "group": torch.tensor(values).double().std(), "none": torch.tensor(1.0)}
        advantages = (centred / by[config.objective.advantage_scale]).tolist()
        for place, (response, advantage) in enumerate(zip(group.responses, advantages, strict=True)):
            assert group.old_logprobs is not None
            members.append((group.task.prompt_ids, response.ids, group.old_logprobs[place], advantage))
    if not policy.frozen_prompt:
        return oracle.objective_gradient(policy.model, members, config.step_objective)
    for prompt, *rest in members:  # masks differ by prompt length; grpo's weights do not depend on the others
        with oracle.adapter_from(policy.model, oracle.first_adapted(len(prompt), policy.adapter_scope)):
            one = oracle.objective_gradient(policy.model, [(prompt, *rest)], config.step_objective)
        for name, gradient in one.items():
            gradients[name] = gradients.get(name, 0.0) + gradient / len(members)
    return gradients


def test_parts_of_a_batch_add_up_in_any_order_also_after_the_second_update() -> None:
    """Replicated LoRA factors: B starts at zero, so a wrong sum over parts shows in A only after an update.

    Here the parts are one process's groups; ranks are compared where ranks are tested.
    """
    prompts = [token_ids(17, 1), token_ids(30, 2)]
    groups = [[token_ids(n, 10 + n) for n in (3, 7)], [token_ids(n, 20 + n) for n in (1, 12)]]
    denominators = StepDenominators.from_lengths(len(r) for group in groups for r in group)
    outcomes = []
    for order in ((0, 1), (1, 0)):
        policy = load_policy(tiny_model("qwen3"), lora=2, dtype=torch.float64)
        optimizer = torch.optim.SGD([p for _, p in policy.trainable_parameters()], lr=0.5)
        for _ in range(3):
            for part in order:
                update_step(
                    policy,
                    prompts[part],
                    groups[part],
                    advantages=[1.0, -1.0],
                    denominators=denominators,
                    chunk_tokens=8,
                    optimizer=optimizer if part == order[-1] else None,
                )
        outcomes.append(weights_of(policy))
    assert oracle.relative_l2(outcomes[0], outcomes[1]) <= 1e-13
    assert all(bool(w.any()) for w in outcomes[0].values())


# ---------------------------------------------------------------- what is skipped, reused and repeated


def test_groups_without_variance_are_skipped_and_said_so() -> None:
    policy = policy_of()
    before = weights_of(policy)
    record = train(policy, TASKS, lambda completions, **_: [1.0] * len(completions), config=config_of())
    for line in record.results["metrics"]:
        assert (line["num_zero_variance_groups"], line["num_skipped_groups"], line["num_tokens"]) == (2, 2, 0)
        assert line["weight_version"] == 0
        assert "all 3 valid rewards of group 0 are equal: nothing to learn from it" in line["notes"]
        assert "no group had anything to learn from: the weights are unchanged" in line["notes"]
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable_parameters())


@pytest.mark.parametrize("drop", [False, True])
def test_a_kl_term_keeps_such_groups_unless_they_are_dropped(drop: bool) -> None:
    policy = policy_of(lora=2)
    train_adapter(policy.model)
    objective = ObjectiveConfig(beta=0.1, drop_zero_variance_groups=drop)
    record = train(
        policy, TASKS, lambda completions, **_: [1.0] * len(completions), config=config_of(objective=objective)
    )
    assert [line["weight_version"] for line in record.results["metrics"]] == ([0, 0] if drop else [1, 2])


def test_members_without_a_reward_are_counted_and_skipping_a_group_leaves_the_others_alone() -> None:
    def some(completions: list[str], **_: Any) -> list[float | None]:
        return [None, 1.0, 0.0, 1.0, 1.0, 1.0][: len(completions)]

    line = train(policy_of(), TASKS, some, config=config_of(num_steps=1)).results["metrics"][0]
    assert (line["num_excluded_members"], line["num_skipped_groups"]) == (1, 1)
    assert line["reward_mean"] == 0.8
    assert line["weight_version"] == 1


@pytest.mark.parametrize(
    ("refresh", "options", "ages"),
    [
        (4, {"gradient_scope": "response_only"}, [0, 1, 2, 3, 0, 1]),
        (1, {"gradient_scope": "response_only"}, [0] * 6),
        (3, {"gradient_scope": "full", "lora": 2, "adapter_scope": "response"}, [0] * 6),
    ],
)
def test_the_age_of_a_reused_state(refresh: int, options: dict[str, Any], ages: list[int]) -> None:
    scope = options.pop("gradient_scope")
    config = config_of(num_steps=6, prompts_per_step=1, refresh=refresh, gradient_scope=scope)
    record = train(policy_of(**options), TASKS[:1], in_order, config=config)
    assert [line["state_ages"] for line in record.results["metrics"]] == [[age] for age in ages]


def test_a_learning_rate_of_zero_has_ratio_one_for_ever() -> None:
    config = config_of(
        num_steps=4, updates_per_batch=2, learning_rate=0.0, refresh=4, gradient_scope="response_only", kept_states=5
    )
    for line in train(policy_of("qwen3_5"), TASKS, letters, config=config).results["metrics"]:
        assert (line["ratio_min"], line["ratio_max"], line["abs_log_ratio_mean"]) == (1.0, 1.0, 0.0)
        assert line["clip_fraction_high"] == line["clip_fraction_low"] == 0.0


def test_a_refresh_policy_decides_for_every_stale_state() -> None:
    """The first reuse is always a refresh, which measures; a tight limit refreshes every time, a wide one reuses."""
    ages = {}
    for limit in (1e-12, 1e3):
        refresh = RefreshPolicy(max_logprob_drift=limit)
        config = config_of(num_steps=4, prompts_per_step=1, refresh=refresh, gradient_scope="response_only")
        record = train(policy_of(), TASKS[:1], in_order, config=config)
        ages[limit] = [line["state_ages"] for line in record.results["metrics"]]
    assert ages[1e-12] == [[0]] * 4
    assert ages[1e3] == [[0], [0], [1], [2]]


@pytest.mark.parametrize("placement", ["host", "recapture"])
def test_where_states_are_held_does_not_matter(placement: str) -> None:
    on_device, other = policy_of("qwen3_5"), policy_of("qwen3_5")
    options = {"updates_per_batch": 2, "checkpoint_layers": True}
    a = train(on_device, TASKS, letters, config=config_of(**options))
    b = train(other, TASKS, letters, config=config_of(state_placement=placement, **options))
    decisions = [line.pop("state_decisions") for line in (*a.results["metrics"], *b.results["metrics"])]
    assert ("no state is held" in str(decisions)) == (placement == "recapture")
    assert lines_of(a) == lines_of(b)
    assert same_weights(on_device, other)


def test_the_order_of_tasks_is_a_permutation_of_every_epoch() -> None:
    at = task_order(5, seed=3)
    epochs = [[at(5 * epoch + i) for i in range(5)] for epoch in range(3)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [task_order(5, seed=3)(i) for i in (14, 7, 0)] == [epochs[2][4], epochs[1][2], epochs[0][0]]


def test_a_rewarded_habit_grows() -> None:
    """Reward: share of vowels among the bytes sampled. Measured, three seeds: 0.00-0.04 before, 0.94-0.99 after."""

    def vowels(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(chr(i) in "aeiou" for i in ids) / len(ids) for ids in completion_ids]

    config = config_of(num_steps=15, group_size=8, learning_rate=2e-2, eval_every=15, eval_samples=8, chunk_tokens=64)
    record = train(policy_of(), TASKS[:3], vowels, config=config, eval_tasks=TASKS[3:])
    first, last = (entry["reward_mean"] for entry in record.results["held_out"])
    assert first < 0.1
    assert last > first + 0.5


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    runs = [train(policy_of(), TASKS, letters, config=config_of(seed=seed)) for seed in (0, 0, 1)]
    assert lines_of(runs[0]) == lines_of(runs[1]) != lines_of(runs[2])


def test_the_learning_rate_follows_its_schedule() -> None:
    config = config_of(num_steps=3, updates_per_batch=2, lr_scheduler_type="linear", warmup_steps=2)
    record = train(policy_of(), TASKS, letters, config=config)
    rates = [line["learning_rate"] for line in record.results["metrics"]]
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])


def test_chat_prompts_reach_rewards_as_messages() -> None:
    seen: list[Any] = []

    class ChatTokenizer(ByteTokenizer):
        chat_template = "yes"

        def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
            return self.encode("".join(message["content"] for message in messages))

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(c[0]["content"])) for c in completions]

    policy = policy_of()
    policy.tokenizer = ChatTokenizer()
    messages = [{"role": "user", "content": "Which door?"}]
    train(policy, [{"prompt": messages}], reward, config=config_of(num_steps=1, prompts_per_step=1))
    assert all(prompt == messages and completion[0]["role"] == "assistant" for prompt, completion in seen)


def test_evaluation_repeats_itself_and_follows_the_weights() -> None:
    policy = policy_of()
    first, again = (evaluate(policy, TASKS, letters, num_samples=2, max_new_tokens=4) for _ in range(2))
    assert first == again
    assert first["num_responses"] == 10
    assert {"reward_mean", "reward/letters_mean", "truncated_fraction"} <= first.keys()


# ---------------------------------------------------------------- files


def undisturbed(folder: Path) -> bytes:
    """Everything under a folder, for `nothing overwritten`."""
    return b"".join(str(p).encode() + p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


def test_what_a_run_writes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(
        num_steps=3, output_dir=folder, eval_every=2, checkpoint_every=1, keep_checkpoints=2, trackers=("tensorboard",)
    )
    policy = policy_of(lora=2)
    record = train(policy, TASKS, [letters, lambda completions, **_: [1.0] * len(completions)], config=config,
                   eval_tasks=TASKS[:2])  # fmt: skip
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["update"]) for line in lines] == [(0, 0), (1, 0), (2, 0)]
    wanted = {
        "reward_mean", "reward_std", "reward/letters_mean", "reward/<lambda>_mean", "response_tokens_mean",
        "truncated_fraction", "ratio_mean", "ratio_max", "ratio_min", "clip_fraction_low", "clip_fraction_high",
        "entropy_mean", "grad_norm", "learning_rate", "tokens_per_second", "seconds", "peak_bytes", "weight_version",
        "state_ages", "notes", "loss",
    }  # fmt: skip
    assert wanted <= lines[0].keys()
    assert {"capture", "sample", "reward", "replay", "prompt_gradient", "optimizer"} <= lines[0]["seconds"].keys()
    assert lines[0]["peak_bytes"] > 0
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in evaluations] == [0, 2, 3]
    saved = json.loads((folder / "run.json").read_text())
    assert saved["status"] == record.status == "completed"
    assert saved["results"]["reward_mean"] == [line["reward_mean"] for line in lines]
    assert any((folder / "trackers").rglob("events.out.tfevents*"))
    restored = load_policy(tiny_model("llama", **SMALL), lora=folder / "checkpoints" / "step-00000003")
    assert same_weights(restored, policy)


def test_ctrl_c_leaves_a_record_and_a_run_that_goes_on(tmp_path: Path) -> None:
    def interrupting(at: int) -> Callable[..., list[float]]:
        def reward(completions: list[str], answer: list[str], trainer_state: Any, **_: Any) -> list[float]:
            if trainer_state.global_step == at:
                raise KeyboardInterrupt
            return letters(completions, answer)

        reward.__name__ = letters.__name__
        return reward

    config = config_of(num_steps=4, output_dir=tmp_path / "run", checkpoint_every=1)
    policy = policy_of()
    record = train(policy, TASKS, interrupting(at=2), config=config)
    assert (record.status, record.results["num_steps"]) == ("interrupted", 2)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    assert all(p.grad is None for _, p in policy.trainable_parameters())
    going_on = policy_of()
    resumed = train(going_on, TASKS, letters, config=config_of(**vars(config) | {"resume": True}))
    assert (resumed.status, resumed.results["num_steps"], resumed.results["num_updates"]) == ("completed", 4, 4)
    undisturbed_policy = policy_of()
    train(undisturbed_policy, TASKS, letters, config=config_of(num_steps=4))
    assert same_weights(going_on, undisturbed_policy)


def test_a_failing_reward_fails_the_run_and_says_so(tmp_path: Path) -> None:
    policy = policy_of()
    with pytest.raises(InvalidInputError, match="2 rewards for 6 completions"):
        train(policy, TASKS, lambda completions, **_: [1.0, 2.0], config=config_of(output_dir=tmp_path / "run"))
    saved = json.loads((tmp_path / "run" / "run.json").read_text())
    assert saved["status"] == "failed"
    assert "2 rewards for 6 completions" in saved["error"]
    assert all(p.grad is None for _, p in policy.trainable_parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resume": False}, "holds a run already"),
        ({"learning_rate": 0.5}, r"differs in config\.learning_rate"),
        ({"objective": ObjectiveConfig(loss="dapo")}, r"differs in config\.objective\.loss \('grpo', now 'dapo'\)"),
        ({"model": "other weights"}, r"differs in model\.parameters"),
        ({"model": "other family"}, r"differs in model\.model \('LlamaForCausalLM', now 'Qwen3ForCausalLM'\)"),
        ({"model": "other scope"}, r"differs in model\.adapter_scope"),
        ({"tasks": TASKS[:4]}, "differs in tasks"),
        ({"damage": "truncated weights"}, r"adapter_model\.safetensors is missing, truncated or changed"),
        ({"damage": "truncated state"}, "is no checkpoint of this package"),
        ({"damage": "foreign"}, "is no checkpoint of this package: trainer_state.json has another format"),
        ({"damage": "metrics"}, "has 0 whole lines, but"),
        ({"damage": "config"}, "has no config.json: it is no run"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_run_goes_on_only_as_itself(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {"num_steps": 1, "prompts_per_step": 1, "group_size": 2, "output_dir": folder}
    train(policy_of(lora=2), TASKS, letters, config=config_of(**options))
    damage_run(folder, change.pop("damage", None))
    kinds: dict[Any, Callable[[], Policy]] = {
        None: lambda: policy_of(lora=2),
        "other weights": lambda: other_weights(policy_of(lora=2)),
        "other family": lambda: policy_of("qwen3", lora=2),
        "other scope": lambda: policy_of(lora=2, adapter_scope="response"),
    }
    policy, tasks = kinds[change.pop("model", None)](), change.pop("tasks", TASKS)
    before, weights = undisturbed(folder), weights_of(policy)
    with pytest.raises(InvalidInputError, match=message):
        train(policy, tasks, letters, config=config_of(**options | {"resume": True} | change))
    assert undisturbed(folder) == before
    assert all(torch.equal(p, weights[name]) for name, p in policy.trainable_parameters())


def other_weights(policy: Policy) -> Policy:
    with torch.no_grad():
        policy.model.get_base_model().model.norm.weight.add_(0.5)
    return policy


def damage_run(folder: Path, kind: str | None) -> None:
    last = folder / "checkpoints" / "step-00000001"
    if kind == "truncated weights":
        weights = last / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
    elif kind == "truncated state":
        state = last / "trainer_state.json"
        state.write_text(state.read_text()[:-10])
    elif kind == "foreign":
        (last / "trainer_state.json").write_text('{"format": "other", "epoch": 3.0}')
    elif kind == "metrics":
        (folder / "metrics.jsonl").write_text("")
    elif kind == "config":
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": ObjectiveConfig(beta=0.1)}, "needs a reference"),
        ({"eos_token_ids": (999,)}, "eos_token_ids"),
        ({"trackers": ("wandb",)}, "the package is not installed"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"foo": 1}}, "do not fit"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_leaves_the_folder_free(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("accelerate.utils.is_wandb_available", lambda: False)
    with pytest.raises(InvalidInputError, match=message):
        train(policy_of(), TASKS, letters, config=config_of(**options, output_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_rewards_read_the_same_trainer_state_in_training_and_evaluation() -> None:
    seen = []

    def curriculum(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        return in_order(completions)

    train(policy_of(), TASKS, curriculum, config=config_of(eval_every=1), eval_tasks=TASKS[:1])
    assert seen == [(0, 2), (0, 2), (1, 2), (1, 2), (2, 2)]
    evaluate(policy_of(), TASKS[:1], curriculum)
    assert seen[-1] == (0, 0)


def test_sampled_chunks_are_drawn_anew_for_every_group_and_update(monkeypatch: Any) -> None:
    walked = []

    def noting(*arguments: Any, **options: Any) -> Any:
        walked.append(options["gradient_scope"])
        return update_step(*arguments, **options)

    monkeypatch.setattr(train_module, "update_step", noting)
    config = config_of(gradient_scope=Sampled(0.5), updates_per_batch=2)
    train(policy_of(), TASKS, in_order, config=config)
    first = list(walked)
    assert len(set(first)) == len(first) == 8
    assert {scope.fraction for scope in first} == {0.5}
    train(policy_of(), TASKS, in_order, config=config)
    assert walked[8:] == first


def test_refreshing_at_every_step_goes_with_every_scope() -> None:
    policies = policy_of(), policy_of()
    for policy, refresh in zip(policies, (1, RefreshPolicy(interval=1)), strict=True):
        train(policy, TASKS, in_order, config=config_of(refresh=refresh))
    assert same_weights(*policies)


def test_what_rewards_log_may_be_scalars_of_numpy_and_torch() -> None:
    def logging(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        for name, value in (("numpy", np.float32(1.5)), ("torch", torch.tensor(2.5)), ("plain", 3.5)):
            log_metric(name, value)
        return in_order(completions)

    line = lines_of(train(policy_of(), TASKS, logging, config=config_of(num_steps=1)))[0]
    assert [line[f"logged/{name}"] for name in ("numpy", "torch", "plain")] == [1.5, 2.5, 3.5]


# ---------------------------------------------------------------- bad input


def needs_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": []}, "there is not one row"),
        ({"tasks": [{"answer": "a"}]}, "row 0: `prompt` must be a text or a list of messages"),
        ({"tasks": [TASKS[0], {"prompt": "b"}]}, "row 1: the rewards need a column `answer`, which is missing"),
        ({"tasks": [TASKS[0], {**TASKS[1], "more": 1}]}, r"row 1: columns differ from row 0's \(more\)"),
        ({"tasks": [{"prompt": "a" * 40000, "answer": "a"}]}, "row 0: prompt_ids has|row 0: the prompt has 40001"),
        ({"tokenizer": None}, "the policy has no tokenizer"),
        ({"vocab_size": 200}, "the tokenizer has ids up to 258, the model only 200"),
        ({"rewards": []}, "at least one reward function"),
        ({"rewards": "exact"}, "not a reward function"),
        ({"config": {"num_steps": 1}}, "config is a dict; give TrainConfig"),
        ({"eval_tasks": TASKS}, "eval_tasks and config.eval_every belong together"),
        ({"config": config_of(eval_every=1)}, "eval_tasks and config.eval_every belong together"),
        ({"config": config_of(reward_weights=(1.0, 2.0))}, "2 for 1 reward functions"),
        ({"config": config_of(refresh=4)}, "would walk another model's prompt"),
        ({"frozen": True}, "no trainable parameter"),
        ({"tasks": [{**TASKS[0], "completions": "x"}]}, "'completions' is a name that reward functions already get"),
        ({"config": config_of(objective=ObjectiveConfig(beta=0.1))}, "beta=0.1 needs a reference"),
        ({"config": config_of(eos_token_ids=(999,))}, "eos_token_ids"),
        ({"config": config_of(eos_token_ids=5)}, "eos_token_ids"),
        ({"config": config_of(max_new_tokens=40_000)}, "row 0: prompt and max_new_tokens has 40"),
        ({"config": config_of(kept_states=7)}, "kept_states=7 reaches nothing"),
        ({"config": config_of(reward_weights=3.0)}, "3.0 is no list of one number"),
        (
            {"config": config_of(lr_scheduler_type="cosine", lr_scheduler_kwargs={"foo": 1})},
            "{'foo': 1} do not fit lr_scheduler_type='cosine'",
        ),
        (
            {"config": config_of(lr_scheduler_type="warmup_stable_decay")},
            "do not fit lr_scheduler_type='warmup_stable_decay'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_one_error_before_any_work(options: dict[str, Any], message: str, monkeypatch: Any) -> None:
    policy = policy_of(vocab_size=options.get("vocab_size"))
    policy.tokenizer = options.get("tokenizer", policy.tokenizer)
    policy.model.requires_grad_(not options.get("frozen"))

    def ran(*_: Any, **__: Any) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr(type(policy.adapter), "forward_chunk", ran)
    with pytest.raises(InvalidInputError, match=message):
        train(
            policy,
            options.get("tasks", TASKS),
            options.get("rewards", needs_answer),
            config=options.get("config", config_of()),
            eval_tasks=options.get("eval_tasks"),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps=0 must be an integer >= 1"),
        ({"group_size": True}, "group_size=True must be an integer >= 1"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be a finite number"),
        ({"temperature": 0.0}, "temperature=0 is not supported"),
        ({"objective": ObjectiveConfig(temperature=0.5)}, "is not the sampling temperature"),
        ({"objective": ObjectiveConfig(max_grad_norm=1.0)}, "give max_grad_norm to TrainConfig"),
        ({"objective": "grpo"}, "is not an ObjectiveConfig"),
        ({"gradient_scope": "half"}, "is not one of full, response_only"),
        ({"state_placement": "disk"}, "is not one of device, host, recapture"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "is not one of linear"),
        ({"warmup_steps": 3}, "reaches nothing with lr_scheduler_type='constant'"),
        ({"refresh": 0}, "refresh=0 must be an integer >= 1 or a RefreshPolicy"),
        ({"refresh": 2, "state_placement": "recapture"}, "refresh reaches nothing"),
        ({"checkpoint_every": 1}, "checkpoint_every=1 reaches nothing without output_dir"),
        ({"resume": True}, "resume=True reaches nothing without output_dir"),
        ({"trackers": ("mlflow",), "output_dir": "x"}, "a tuple of tensorboard, wandb"),
        ({"adam_betas": (0.9, 1.0)}, "two numbers in"),
        ({"adam_betas": None}, "two numbers in"),
        ({"seed": 0.5}, "seed=0.5 must be an integer"),
        ({"top_p": 2.0}, r"top_p=2.0 must be in \(0, 1\]"),
        ({"trackers": None}, "a tuple of tensorboard, wandb"),
        ({"lr_scheduler_kwargs": None}, "must be a mapping"),
        ({"lr_scheduler_kwargs": {"foo": 1}}, "reaches nothing with 'constant'"),
        ({"kept_states": 2, "state_placement": "recapture"}, "kept_states reaches nothing"),
        ({"eval_samples": 7}, "eval_samples=7 reaches nothing without eval_every"),
        ({"eval_temperature": 0.5}, "eval_temperature=0.5 reaches nothing without eval_every"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_makes_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        config_of(**options)
