"""TRL's own GRPOTrainer, given the same sampled ids, computes the same losses and gradients over several updates.

`train()` runs first and its samples are recorded. Then GRPOTrainer runs on a copy of the model with the same data,
rewards and hyperparameters; only its generation is replaced, by the recorded ids. Two updates per batch on two batches:
parameters move, the second update of a batch is off-policy and clips.

Measured (float32, 4 updates, torch 2.13, trl 1.16): losses within 3e-6 of the largest one, gradients within 4e-6
relative L2. The bounds are 1e-4, the agreement that was asked for.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests import oracle
from tests.helpers import token_ids
from workbench import ObjectiveConfig, Policy, TrainConfig, load_policy, train, train_optimizer
from workbench.model_sources import tiny_model

trl = pytest.importorskip("trl", reason="needs trl, of the `dev` extra")
datasets = pytest.importorskip("datasets", reason="needs datasets, which trl brings")

train_module = sys.modules["workbench.train"]
PROMPTS = [" ".join(f"<{i}>" for i in token_ids(length, length).tolist()) for length in (9, 14, 6, 11)]
PROMPTS_PER_STEP, GROUP, UPDATES, STEPS = 2, 3, 2, 2
LEARNING_RATE, EPSILON, TEMPERATURE = 3e-3, 1e-4, 0.9


def tokenizer_of_101_words() -> Any:
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(101)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<2>", pad_token="<0>")


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


def our_run(policy: Policy, monkeypatch: Any) -> tuple[list[Any], list[float], list[oracle.Gradients]]:
    batches: list[Any] = []
    gradients: list[oracle.Gradients] = []
    make_batch, apply = train_module.make_batch, train_optimizer.apply_gradients
    monkeypatch.setattr(train_module, "make_batch", lambda *a: batches.append(make_batch(*a)) or batches[-1])

    def spied_apply(policy: Policy, *args: Any, **options: Any) -> float:
        gradients.append({n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None})
        return apply(policy, *args, **options)

    monkeypatch.setattr(train_optimizer, "apply_gradients", spied_apply)
    config = TrainConfig(
        num_steps=STEPS,
        prompts_per_step=PROMPTS_PER_STEP,
        group_size=GROUP,
        updates_per_batch=UPDATES,
        max_new_tokens=7,
        temperature=TEMPERATURE,
        eos_token_ids=tuple(range(2, 20)),  # a fifth of the vocabulary, so that responses have unequal lengths
        learning_rate=LEARNING_RATE,
        adam_epsilon=1e-6,
        max_grad_norm=0.5,
        objective=ObjectiveConfig(loss="grpo", advantage_eps=EPSILON),
        chunk_tokens=4,
        block_tokens=3,
        seed=5,
    )
    record = train(policy, [{"prompt": prompt} for prompt in PROMPTS], even_ids, config=config)
    return batches, [line["loss"] for line in record.results["metrics"]], gradients


def trl_run(model: Any, batches: list[Any], folder: Path) -> tuple[list[float], list[oracle.Gradients]]:
    losses: list[float] = []
    gradients: list[oracle.Gradients] = []
    recorded = {
        tuple(group.task.prompt_ids.tolist()): [response.ids.tolist() for response in group.responses]
        for batch in batches
        for group in batch.groups
    }

    class RecordedGRPOTrainer(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
            taken: dict[tuple[int, ...], int] = {}
            completions = []
            for ids in map(tuple, prompt_ids):
                taken[ids] = taken.get(ids, -1) + 1
                completions.append(recorded[ids][taken[ids]])
            return completions, None

        def training_step(self, model: Any, *args: Any, **options: Any) -> Any:
            loss = super().training_step(model, *args, **options)
            losses.append(float(loss))
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            return loss

    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        loss_type="grpo",
        beta=0.0,
        per_device_train_batch_size=PROMPTS_PER_STEP * GROUP,
        num_generations=GROUP,
        num_iterations=UPDATES,
        max_steps=STEPS * UPDATES,
        max_completion_length=7,
        temperature=TEMPERATURE,
        scale_rewards="group",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_epsilon=1e-6,
        weight_decay=0.0,
        max_grad_norm=0.5,
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    tokenizer = tokenizer_of_101_words()
    order = [group.task.prompt for batch in batches for group in batch.groups]
    trainer = RecordedGRPOTrainer(
        model=model,
        reward_funcs=even_ids,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in order]),
        processing_class=tokenizer,
    )
    trainer.train()
    return losses, gradients


def weights(model: Any) -> oracle.Gradients:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("default")  # trl and datasets have their own
@pytest.mark.parametrize("lora", [None, 2], ids=["all parameters", "lora"])
def test_losses_and_gradients_are_those_of_grpo_trainer(lora: int | None, tmp_path: Path, monkeypatch: Any) -> None:
    policy = load_policy(tiny_model("llama"), lora=lora)
    policy.tokenizer = tokenizer_of_101_words()
    theirs = copy.deepcopy(policy.model)
    batches, losses, gradients = our_run(policy, monkeypatch)
    assert len({len(response) for batch in batches for group in batch.groups for response in group.responses}) > 2
    assert len({tuple(group.task.prompt_ids.tolist()) for batch in batches for group in batch.groups}) == 4
    their_losses, their_gradients = trl_run(theirs, batches, tmp_path)
    assert len(losses) == len(their_losses) == STEPS * UPDATES
    assert any(abs(loss) > 1e-3 for loss in losses)  # off-policy losses are not zero
    scale = max(map(abs, their_losses))
    assert all(abs(a - b) <= 1e-4 * scale for a, b in zip(losses, their_losses, strict=True))
    errors = [oracle.relative_l2(a, b) for a, b in zip(gradients, their_gradients, strict=True)]
    assert max(errors) <= 1e-4
    ours_after, theirs_after = (weights(m) for m in (policy.model, theirs))
    assert oracle.relative_l2(ours_after, theirs_after) <= 1e-4
    moved = oracle.relative_l2(ours_after, weights(load_policy(tiny_model("llama"), lora=lora).model))
    assert moved > 1e-3  # and there was something to agree on
