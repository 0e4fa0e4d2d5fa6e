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
from types import SimpleNamespace
from typing import Any

from workbench.comm import Mesh
from workbench.errors import InvalidInputError
from workbench.evaluate import evaluate_tasks
from workbench.inputs import check_end_ids, entry_point
from workbench.policy import Policy
from workbench.progress import progress
from workbench.records import RunRecord
from workbench.rewards import check_rewards
from workbench.rollout import sample_responses
from workbench.seeds import derived_seed, scope_at
from workbench.step import check_reference
from workbench.train_batch import (
    Batch,
    Group,
    RewardFunctions,
    Task,
    make_batch,
    read_checked_tasks,
    reward_responses,
    task_order,
)
from workbench.train_config import TrainConfig
from workbench.train_metrics import GroupUpdate, batch_metrics, measured_metrics, update_metrics
from workbench.train_optimizer import RunOptimizer
from workbench.train_output import Position, RunOutput
from workbench.train_ranks import TrainRanks, open_train_ranks, require_same_run
from workbench.train_states import StateStore
from workbench.train_trackers import Trackers, check_trackers
from workbench.types import GradientScope, Response
from workbench.update import update_step


@entry_point
def train(
    policy: Policy,
    tasks: Any,
    rewards: RewardFunctions,
    *,
    config: TrainConfig,
    eval_tasks: Any = None,
    comm: Mesh | None = None,
) -> RunRecord:
    """Train the policy's trainable parameters on tasks by group-relative policy optimisation.

    tasks: mappings with a column `prompt` (text or chat messages) and whatever columns the rewards read: a list, a
        `datasets.Dataset` or a JSONL file. rewards: one or several functions of TRL's signature.
    eval_tasks: held-out tasks, for config.eval_every.
    comm: the mesh of ranks (workbench.parallel.open_mesh); every rank calls with the same arguments. Data ranks divide
        the prompts of a step, context ranks share each (train_ranks.py). Responses, rewards and metrics are those of
        one process; every rank ends with bitwise the same weights. Rank 0 calls the rewards and writes.

    The policy is left trained, in the state of its last update. Ctrl-C ends the run with a record of status
    "interrupted" (over ranks it is raised again: they stopped at different places); any other error is raised after
    the record says "failed". The record's results hold the curves;
    metrics of every update are in output_dir/metrics.jsonl, or under "metrics" if there is no output_dir.
    Raises InvalidInputError before any work for a task without what the rewards need, a tokenizer that does not fit,
    an output_dir in use, a checkpoint of another run, and what ranks cannot do; RanksDisagreeError.
    """
    if not isinstance(config, TrainConfig):
        raise InvalidInputError(f"config is a {type(config).__name__}; give TrainConfig(num_steps=..., ...)")
    if (eval_tasks is None) != (config.eval_every is None):
        raise InvalidInputError("eval_tasks and config.eval_every belong together: give both or neither")
    reward_names = check_rewards(rewards, config.reward_weights)
    room = config.max_new_tokens
    checked = read_checked_tasks(policy, tasks, rewards, max_new_tokens=room)
    held_out = None
    if eval_tasks is not None:
        held_out = read_checked_tasks(policy, eval_tasks, rewards, "eval_tasks", max_new_tokens=room)
    check_reference(policy, config.objective)
    if config.eos_token_ids is not None:
        check_end_ids(policy, config.eos_token_ids)
    check_trackers(config.trackers)
    ranks = open_train_ranks(policy, config, comm)
    run = _Run(ranks, checked, rewards, reward_names, config, held_out)
    return run.to_the_end()


class _Run:
    """One training run: what its stages share."""

    def __init__(
        self,
        ranks: TrainRanks,
        tasks: list[Task],
        rewards: RewardFunctions,
        reward_names: list[str],
        config: TrainConfig,
        eval_tasks: list[Task] | None,
    ) -> None:
        self.ranks, self.policy = ranks, ranks.policy
        self.tasks, self.rewards, self.config, self.eval_tasks = tasks, rewards, config, eval_tasks
        self.optimizer = RunOptimizer(self.policy, config, ranks.mesh)
        self.states = StateStore(self.policy, config, ranks.of_a_prompt)
        self.task_at = task_order(len(tasks), config.seed)
        self.output = RunOutput(
            self.policy, tasks, config, eval_tasks=eval_tasks, rewards=reward_names, writes=ranks.first
        )
        require_same_run(ranks, config, tasks, eval_tasks)  # every rank has looked at the folder before one writes
        self.position = self.output.start(self.optimizer.torch_optimizer, self.optimizer.scheduler)
        ranks.require_same("the checkpoint in output_dir, which every rank must see", self.position)
        ranks.require_same_weights()
        self.first_version = self.policy.weight_version - self.position.weight_version
        self.trackers = Trackers(config.trackers if ranks.first else (), self.output.folder, config.identity())
        self.seconds: dict[str, float] = {}  # of the update in work
        self.cpu_clock = time.process_time()

    def to_the_end(self) -> RunRecord:
        clock = time.perf_counter()
        status, error = "failed", None
        self._record("running", None, 0.0)
        try:
            self._steps()
            status = "completed"
        except KeyboardInterrupt:
            status, error = "interrupted", f"KeyboardInterrupt in step {self.position.step}"
            if self.ranks.several:
                raise
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}"
            raise
        finally:
            for _, parameter in self.policy.trainable_parameters():
                parameter.grad = None
            record = self._record(status, error, time.perf_counter() - clock)
            self.trackers.finish()
        # no rank returns before the first has written everything
        self.ranks.require_same("where the run ended", self.position)
        return record

    def _record(self, status: str, error: str | None, seconds: float) -> RunRecord:
        return self.output.record(status, error, self.position.step, seconds, self.ranks.degrees)

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

    def _takes(self, slot: int, task: Task) -> bool:
        """Does this rank work on the prompt? Where states outlive updates, whoever holds a task's state does."""
        if self.states.outlive_updates:
            return self.ranks.takes_task(task.index)
        return self.ranks.takes(slot, self.config.prompts_per_step)

    def _checkpoint_when_due(self) -> None:
        if self.output.due(self.position.step):
            # a resumed run has no old states; the one that goes on must not have them either
            if self.config.reuses_states and not self.policy.frozen_prompt:
                self.states.forget(0)
            self.output.checkpoint(self.position, self.optimizer.torch_optimizer, self.optimizer.scheduler)

    # ---------------------------------------------------------------- stages

    def _sampled_batch(self, step: int) -> Batch:
        config = self.config
        self.seconds, self.cpu_clock = {}, time.process_time()
        places = range(step * config.prompts_per_step, (step + 1) * config.prompts_per_step)
        tasks = [self.tasks[self.task_at(place)] for place in places]
        own: dict[int, list[Response]] = {}
        for slot, task in enumerate(tasks):
            if self._takes(slot, task):
                own[slot] = self._sampled_group(task, derived_seed(config.seed, "sample", step, slot))
            else:
                self.states.used_elsewhere(task.index)
        with self._timed("gather"):
            responses = self.ranks.all_responses(own)
        with self._timed("reward"):
            state = self._trainer_state(step)
            table = self.ranks.rewards_of_first(
                lambda: reward_responses(self.policy, tasks, responses, self.rewards, config.reward_weights, state)
            )
        return make_batch(tasks, responses, table, config.objective)

    def _trainer_state(self, step: int) -> SimpleNamespace:
        """What reward functions read of TRL's TrainerState."""
        return SimpleNamespace(global_step=step, max_steps=self.config.num_steps)

    def _sampled_group(self, task: Task, seed: int) -> list[Response]:
        config = self.config
        with self._timed("capture"):
            state = self.states.state_for(task.index, task.prompt_ids)
        with self._timed("sample"):
            responses = sample_responses(
                self.policy,
                state,
                config.group_size,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                eos_token_ids=config.eos_token_ids,
                seed=seed,
                allow_stale=True,
            )
        self.states.note_responses(task.index, responses)
        return responses

    def _update(self, step: int, update: int, batch: Batch) -> None:
        """One optimizer update: gradients of all groups that can learn, accumulated under the batch's denominators."""
        config, learning_rate = self.config, self.optimizer.learning_rate
        groups = {slot: group for slot, group in enumerate(batch.groups) if group.learns}
        own: dict[int, dict[str, Any]] = {}
        for slot, group in groups.items():
            if self._takes(slot, group.task):
                scope = scope_at(config.gradient_scope, config.seed, step, update, slot)
                own[slot] = vars(self._replayed(group, batch, scope))
            else:
                self.states.used_elsewhere(group.task.index)
        if self.ranks.mesh is not None:
            with self._timed("reduction"):
                self.optimizer.sum_over_ranks()
        with self._timed("optimizer"):
            norm = self.optimizer.apply()
        parts = [GroupUpdate(**part) for part in self.ranks.union(own, "reports")]
        notes = [*batch.notes, *dict.fromkeys(note for part in parts for note in part.metrics["notes"])]
        if not parts:
            notes.append("no group had anything to learn from: the weights are unchanged")
        num_tokens = sum(g.task.prompt_ids.numel() + sum(map(len, g.responses)) for g in groups.values())
        self.output.metrics.append(
            {
                "step": step,
                "update": update,
                **batch_metrics(batch),
                **update_metrics(parts),
                "grad_norm": norm,
                "learning_rate": learning_rate,
                "weight_version": self._weight_version(),
                "notes": notes,
                **measured_metrics(parts, self.seconds, time.process_time() - self.cpu_clock, num_tokens),
            }
        )
        self.seconds, self.cpu_clock = {}, time.process_time()
        num_updates = len(self.output.metrics.lines)
        self.trackers.log(self.output.metrics.lines[-1], num_updates, "train")

    def _replayed(self, group: Group, batch: Batch, scope: GradientScope) -> GroupUpdate:
        config = self.config
        state = None
        if self.states.holds:
            with self._timed("capture"):
                state = self.states.state_for(group.task.index, group.task.prompt_ids)
        age = 0 if state is None else self.states.age(state)
        self.ranks.stage("update")
        report = update_step(
            self.policy,
            group.task.prompt_ids,
            group.responses,
            advantages=group.advantages,
            objective=config.step_objective,
            gradient_scope=scope,
            chunk_tokens=config.chunk_tokens,
            block_tokens=config.block_tokens,
            checkpoint_layers=config.checkpoint_layers,
            state=state,
            old_logprobs=group.old_logprobs,
            denominators=batch.denominators,
            comm=self.ranks.of_a_prompt,
            allow_stale=age > 0,
            measure_memory=config.measure_memory,
        )
        if group.old_logprobs is None:
            group.old_logprobs = report.logprobs
        for stage, seconds in report.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        return GroupUpdate.of(report, age, self.states.why(group.task.index))

    def _evaluate_when_due(self) -> None:
        config, step = self.config, self.position.step
        due = config.eval_every and (step % config.eval_every == 0 or step == config.num_steps)
        if self.eval_tasks is None or not due:
            return
        result = evaluate_tasks(
            self.ranks,
            self.eval_tasks,
            self.rewards,
            num_samples=config.eval_samples,
            max_new_tokens=config.max_new_tokens,
            temperature=config.eval_temperature,
            eos_token_ids=config.eos_token_ids,
            chunk_tokens=config.chunk_tokens,
            reward_weights=config.reward_weights,
            seed=config.seed,
            trainer_state=self._trainer_state(step),
        )
        self.output.evaluations.append({"step": step, "weight_version": self._weight_version(), **result})
        num_updates = len(self.output.metrics.lines)
        self.trackers.log(self.output.evaluations.lines[-1], num_updates, "evaluation")

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        self.ranks.stage(stage)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
