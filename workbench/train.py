"""Online GRPO: sample, reward, update, repeat.

    sample     every prompt of a step: its resident state, then a group of responses from it
    reward     all responses in one call of each reward function
    weigh      advantages and denominators over the whole batch, before any backward
    update     group by group, gradients accumulated, one optimizer call; several times per batch if asked
    write      one line of metrics; evaluation and checkpoint when due

Departures from GRPO as published (arXiv 2402.03300): the objective is what `ObjectiveConfig` names; the old
log-probabilities are those of the first update on a batch (the same path that trains), not the sampler's; a group whose
rewards are all equal is not replayed when no KL term asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import torch
from transformers import get_scheduler

from workbench.errors import InvalidInputError
from workbench.evaluate import evaluate_tasks
from workbench.finalize import apply_gradients, gradient_norm
from workbench.inputs import entry_point
from workbench.policy import Policy
from workbench.progress import progress
from workbench.records import RunRecord, provenance
from workbench.rewards import check_rewards
from workbench.rollout import sample_responses
from workbench.train_batch import (
    Batch,
    Group,
    RewardFunctions,
    Task,
    derived_seed,
    make_batch,
    read_checked_tasks,
    reward_responses,
    task_order,
)
from workbench.train_config import TrainConfig
from workbench.train_metrics import batch_metrics, measured_metrics, update_metrics
from workbench.train_output import Position, RunOutput
from workbench.train_states import StateStore
from workbench.train_trackers import Trackers
from workbench.types import StepReport
from workbench.update import update_step


@entry_point
def train(
    policy: Policy,
    tasks: Any,
    rewards: RewardFunctions,
    *,
    config: TrainConfig,
    eval_tasks: Any = None,
) -> RunRecord:
    """Train the policy's trainable parameters on tasks by group-relative policy optimisation.

    tasks: mappings with a column `prompt` (text or chat messages) and whatever columns the rewards read: a list, a
        `datasets.Dataset` or a JSONL file. rewards: one or several functions of TRL's signature.
    eval_tasks: held-out tasks, for config.eval_every.

    The policy is left trained, in the state of its last update. Ctrl-C ends the run with a record of status
    "interrupted"; any other error is raised after the record says "failed". The record's results hold the curves;
    metrics of every update are in output_dir/metrics.jsonl, or under "metrics" if there is no output_dir.
    Raises InvalidInputError before any work for a task without what the rewards need, a tokenizer that does not fit,
    an output_dir in use, a checkpoint of another run.
    """
    if not isinstance(config, TrainConfig):
        raise InvalidInputError(f"config is a {type(config).__name__}; give TrainConfig(num_steps=..., ...)")
    if (eval_tasks is None) != (config.eval_every is None):
        raise InvalidInputError("eval_tasks and config.eval_every belong together: give both or neither")
    check_rewards(rewards, config.reward_weights)
    checked = read_checked_tasks(policy, tasks, rewards)
    held_out = None if eval_tasks is None else read_checked_tasks(policy, eval_tasks, rewards, "eval_tasks")
    run = _Run(policy, checked, rewards, config, held_out)
    return run.to_the_end()


class _Run:
    """One training run: what its stages share."""

    def __init__(
        self,
        policy: Policy,
        tasks: list[Task],
        rewards: RewardFunctions,
        config: TrainConfig,
        eval_tasks: list[Task] | None,
    ) -> None:
        self.policy, self.tasks, self.rewards, self.config, self.eval_tasks = policy, tasks, rewards, config, eval_tasks
        parameters = [p for _, p in policy.trainable_parameters()]
        if not parameters:
            raise InvalidInputError("the policy has no trainable parameter: nothing would learn")
        if any(p.grad is not None for p in parameters):
            raise InvalidInputError("the policy has gradients from earlier work; optimizer.zero_grad() before train()")
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=config.adam_betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
        )
        self.scheduler = get_scheduler(
            config.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.num_steps * config.updates_per_batch,
            scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs) or None,
        )
        self.states = StateStore(policy, config)
        self.task_at = task_order(len(tasks), config.seed)
        self.output = RunOutput(policy, tasks, config)
        self.position = self.output.start(self.optimizer, self.scheduler)
        self.first_version = policy.weight_version - self.position.weight_version
        self.trackers = Trackers(config.trackers, self.output.folder, config.identity())
        self.provenance = provenance()
        self.seconds: dict[str, float] = {}  # of the update in work

    def to_the_end(self) -> RunRecord:
        started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
        status, error = "failed", None
        self.output.record(self._record("running", None, started, 0.0))
        try:
            self._steps()
            status = "completed"
        except KeyboardInterrupt:
            status, error = "interrupted", f"KeyboardInterrupt in step {self.position.step}"
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}"
            raise
        finally:
            for _, parameter in self.policy.trainable_parameters():
                parameter.grad = None
            record = self._record(status, error, started, time.perf_counter() - clock)
            self.output.record(record)
            self.trackers.finish()
        return record

    def _steps(self) -> None:
        config = self.config
        if not self.output.resumed:
            self._evaluate_when_due()
            self._checkpoint_when_due()
        for step in progress(range(self.position.step, config.num_steps), "train", unit="step"):
            # 1. Sample, 2. reward, 3. weigh: advantages and denominators of the whole batch
            batch = self._sampled_batch(step)
            # 4. Update, several times if asked
            for update in range(config.updates_per_batch):
                self._update(step, update, batch)
            del batch
            self.states.forget(config.prompts_per_step if config.kept_states is None else config.kept_states)
            self.position = Position(step + 1, self._weight_version())
            # 5. Evaluate and save when due
            self._evaluate_when_due()
            self._checkpoint_when_due()

    def _weight_version(self) -> int:
        """Updates since the run began that changed the weights."""
        return self.policy.weight_version - self.first_version

    def _checkpoint_when_due(self) -> None:
        if self.output.due(self.position.step):
            # a resumed run has no old states; the one that goes on must not have them either
            if self.config.reuses_states and not self.policy.frozen_prompt:
                self.states.forget(0)
            self.output.checkpoint(self.position, self.optimizer, self.scheduler)

    # ---------------------------------------------------------------- stages

    def _sampled_batch(self, step: int) -> Batch:
        config = self.config
        self.seconds = {}
        places = range(step * config.prompts_per_step, (step + 1) * config.prompts_per_step)
        tasks = [self.tasks[self.task_at(place)] for place in places]
        responses = []
        for slot, task in enumerate(tasks):
            with self._timed("capture"):
                state = self.states.state_for(task.index, task.prompt_ids)
            with self._timed("sample"):
                responses.append(
                    sample_responses(
                        self.policy,
                        state,
                        config.group_size,
                        max_new_tokens=config.max_new_tokens,
                        temperature=config.temperature,
                        top_p=config.top_p,
                        eos_token_ids=config.eos_token_ids,
                        seed=derived_seed(config.seed, "sample", step, slot),
                        allow_stale=True,
                    )
                )
            self.states.note_responses(task.index, responses[-1])
            del state
        with self._timed("reward"):
            trainer_state = SimpleNamespace(global_step=step, max_steps=config.num_steps)
            table = reward_responses(self.policy, tasks, responses, self.rewards, config.reward_weights, trainer_state)
        return make_batch(tasks, responses, table, config.objective)

    def _update(self, step: int, update: int, batch: Batch) -> None:
        """One optimizer update: gradients of all groups that can learn, accumulated under the batch's denominators."""
        reports, ages = [], []
        learning_rate = self.scheduler.get_last_lr()[0]
        groups = [group for group in batch.groups if group.learns]
        for group in groups:
            report, age = self._replayed(group, batch)
            reports.append(report)
            ages.append(age)
        with self._timed("optimizer"):
            norm = gradient_norm(self.policy)
            apply_gradients(self.policy, self.optimizer, max_grad_norm=self.config.max_grad_norm)
            self.scheduler.step()
        notes = [*batch.notes, *dict.fromkeys(note for report in reports for note in report.metrics["notes"])]
        if not reports:
            notes.append("no group had anything to learn from: the weights are unchanged")
        num_tokens = sum(g.task.prompt_ids.numel() + sum(map(len, g.responses)) for g in groups)
        self.output.metrics.append(
            {
                "step": step,
                "update": update,
                **batch_metrics(batch),
                **update_metrics(reports),
                "grad_norm": norm,
                "learning_rate": learning_rate,
                "weight_version": self._weight_version(),
                "state_ages": ages,
                "state_decisions": [self.states.why(group.task.index) for group in groups],
                "notes": notes,
                **measured_metrics(reports, self.seconds, num_tokens),
            }
        )
        self.seconds = {}
        num_updates = len(self.output.metrics.lines)
        self.trackers.log(self.output.metrics.lines[-1], num_updates, "train")

    def _replayed(self, group: Group, batch: Batch) -> tuple[StepReport, int]:
        config = self.config
        state = None
        if self.states.holds:
            with self._timed("capture"):
                state = self.states.state_for(group.task.index, group.task.prompt_ids)
        age = 0 if state is None else self.states.age(state)
        report = update_step(
            self.policy,
            group.task.prompt_ids,
            group.responses,
            advantages=group.advantages,
            objective=config.step_objective,
            gradient_scope=config.gradient_scope,
            chunk_tokens=config.chunk_tokens,
            block_tokens=config.block_tokens,
            checkpoint_layers=config.checkpoint_layers,
            state=state,
            old_logprobs=group.old_logprobs,
            denominators=batch.denominators,
            allow_stale=age > 0,
            measure_memory=config.measure_memory,
        )
        if group.old_logprobs is None:
            group.old_logprobs = report.logprobs
        return report, age

    def _evaluate_when_due(self) -> None:
        config, step = self.config, self.position.step
        due = config.eval_every and (step % config.eval_every == 0 or step == config.num_steps)
        if self.eval_tasks is None or not due:
            return
        result = evaluate_tasks(
            self.policy,
            self.eval_tasks,
            self.rewards,
            num_samples=config.eval_samples,
            max_new_tokens=config.max_new_tokens,
            temperature=config.eval_temperature,
            eos_token_ids=config.eos_token_ids,
            chunk_tokens=config.chunk_tokens,
            reward_weights=config.reward_weights,
            seed=config.seed,
        )
        self.output.evaluations.append({"step": step, "weight_version": self._weight_version(), **result})
        num_updates = len(self.output.metrics.lines)
        self.trackers.log(self.output.evaluations.lines[-1], num_updates, "evaluation")

    # ---------------------------------------------------------------- record

    def _record(self, status: str, error: str | None, started: str, seconds: float) -> RunRecord:
        lines = self.output.metrics.lines
        by_stage: dict[str, float] = {"total": seconds}
        for line in lines:
            for stage, value in line["seconds"].items():
                by_stage[stage] = by_stage.get(stage, 0.0) + value
        results: dict[str, Any] = {
            "num_steps": self.position.step,
            "num_updates": len(lines),
            "reward_mean": [line["reward_mean"] for line in lines if line["update"] == 0],
            "held_out": [{"step": e["step"], "reward_mean": e["reward_mean"]} for e in self.output.evaluations.lines],
        }
        if self.config.output_dir is None:
            results |= {"metrics": lines, "evaluations": self.output.evaluations.lines}
        return RunRecord(
            name="train",
            status=status,
            error=error,
            parameters=self.config.identity(),
            seed=self.config.seed,
            device=str(self.policy.device),
            started_at=started,
            finished_at=None if status == "running" else datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=by_stage,
            memory={"peak_bytes": max((line["peak_bytes"] or 0 for line in lines), default=0)},
            evidence={"level": 1 if lines else 0, "checks": []},
            results=results,
            provenance=self.provenance,
        )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
