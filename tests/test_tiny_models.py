"""The bundled models: small files that load by name and answer held-out tasks; and the code that trains them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from workbench import InvalidInputError, Policy, load_policy, model_sources
from workbench.model_sources import BUNDLED_FOLDER, BUNDLED_MODELS, MissingBundledModelError, bundled_model_path
from workbench.tasks import check_tokenizer, words
from workbench.tiny_models import RECIPES, evaluation, make, measure
from workbench.tiny_models.__main__ import main
from workbench.tiny_models.indexer import dense_selection, index_scores
from workbench.tiny_models.practice import Practice
from workbench.tiny_models.training import Training
from workbench.tiny_models.vocabulary import VOCAB_SIZE, library_tokenizer

FINISHED = ("tiny-hybrid", "tiny-glm-dsa")


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_bundled_models_load_by_name_and_are_small(name: str):
    folder = bundled_model_path(name)
    assert (folder / "model.safetensors").stat().st_size < 12e6
    policy = load_policy(name)
    assert policy.dtype == torch.float32
    check_tokenizer(policy.tokenizer, policy.vocab_size)
    assert len(policy.tokenizer) == VOCAB_SIZE
    assert policy.eos_token_ids() == (policy.tokenizer.eos_token_id,)
    record = json.loads((folder / "training.json").read_text())
    assert record["name"] == name
    assert not record["interrupted"]
    assert record["recipe"]["seed"] == RECIPES[name].seed
    assert record["num_parameters"] == sum(parameter.numel() for parameter in policy.model.parameters())


def test_all_files_together_stay_small():
    assert sum(path.stat().st_size for path in BUNDLED_FOLDER.rglob("*") if path.is_file()) < 26e6


@pytest.mark.parametrize("style", ["token", "sentence"])
@pytest.mark.parametrize("name", FINISHED)
def test_finished_models_retrieve(name: str, style: str):
    """One fact of eight at 1,024 tokens; the record says how many of forty, chance is one of eight."""
    (found,) = measure(load_policy(name), prompt_tokens=[1024], answer_styles=[style], num_tasks=8, seed=7)
    assert found.greedy >= 0.75


@pytest.mark.parametrize(
    ("name", "cases", "varied"),
    [
        ("tiny-hybrid-half", {("sentence", 8), ("token", 32)}, 0.3),
        ("tiny-glm-dsa-half", {("token", 8), ("sentence", 32)}, 0.2),  # sentences of 8 facts at 1,024 tokens: 0.06
    ],
)
def test_half_trained_models_have_room_to_improve(name: str, cases: set[tuple[str, int]], varied: float):
    """GRPO learns from groups whose rewards are not all equal, and only where the mean is not at its end already."""
    record = json.loads((bundled_model_path(name) / "training.json").read_text())
    sampled = {(found["answer_style"], found["num_needles"]): found for found in record["accuracies"] if found["group"]}
    for case in cases:
        assert 0.15 <= sampled[case]["sampled"] <= 0.8
        assert sampled[case]["varied_groups"] >= varied


def test_half_trained_hybrid_still_varies():
    name = "tiny-hybrid-half"
    policy = load_policy(name)
    (found,) = measure(
        policy, prompt_tokens=[1024], answer_styles=["sentence"], num_tasks=6, sampled_tokens=1024, seed=8
    )
    assert found.sampled is not None
    assert 0.05 < found.sampled < 0.8
    assert found.varied_groups is not None
    assert found.varied_groups >= 1 / 3


def test_a_missing_bundled_model_says_where_it_would_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(model_sources, "BUNDLED_FOLDER", tmp_path)
    with pytest.raises(MissingBundledModelError, match=r"python -m workbench\.tiny_models tiny-hybrid"):
        load_policy("tiny-hybrid")
    with pytest.raises(InvalidInputError, match="not one of the bundled models"):
        bundled_model_path("tiny-gpt")


# --- how they are made -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return library_tokenizer()


def test_the_tokenizer_knows_every_word_of_the_tasks(tokenizer: Any):
    assert len(tokenizer) == VOCAB_SIZE
    ids = tokenizer.convert_tokens_to_ids([*words.template_words(), *words.KEYS, *words.VALUES])
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(tokenizer.encode(words.fact("bird", "red"))) == "the code of bird is red ."


@pytest.mark.parametrize("tokens", [64, 128, 500])
def test_practice_counts_values_that_the_sequence_has_given(tokenizer: Any, tokens: int):
    practice = Practice(tokenizer, "a file is in this object . " * 200, RECIPES["tiny-hybrid"])
    values = set(tokenizer.convert_tokens_to_ids(list(words.VALUES)))
    ids, targets, counted = practice.batch(Random(0), 20, tokens)
    assert ids.shape == targets.shape == counted.shape == (20, tokens)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    for row, right, counts in zip(ids.tolist(), targets.tolist(), counted.tolist(), strict=True):
        asked = [(at, token) for at, token in enumerate(right) if counts[at] and token in values]
        assert asked
        assert all(token in row[: at + 1] for at, token in asked), "every answer stands earlier in the sequence"
    same = practice.batch(Random(0), 20, tokens)
    assert torch.equal(same[0], ids)


def test_copying_counts_only_what_the_sequence_has_shown_to_follow(tokenizer: Any):
    practice = Practice(tokenizer, "a file is in this object . " * 200, RECIPES["tiny-glm-dsa"])
    ids, targets, counted = practice.copying_batch(Random(0), 20, 64, 70)
    assert ids.shape == targets.shape == counted.shape == (20, 70)
    assert ids.min() >= 3
    assert ids.max() < 64
    for row, right, counts in zip(ids.tolist(), targets.tolist(), counted.tolist(), strict=True):
        followed: dict[int, int] = {}
        for token, after, counts_here in zip(row, right, counts, strict=True):
            assert counts_here == (token in followed)
            assert followed.setdefault(token, after) == after


def test_the_index_scores_are_the_models_own():
    """The copy with a graph ranks keys exactly as the stock forward, which has none."""
    model = RECIPES["tiny-glm-dsa"].build()
    indexer = model.model.layers[0].self_attn.indexer
    indexer.index_topk = 9
    seen: dict[str, Any] = {}
    hook = indexer.register_forward_pre_hook(lambda _, arguments: seen.update(arguments=arguments))
    ids = torch.randint(0, VOCAB_SIZE, (2, 50), generator=torch.Generator().manual_seed(0))
    model(ids)
    hook.remove()
    stock = indexer(*seen["arguments"])
    ours = index_scores(indexer, *seen["arguments"][:3]).topk(9, dim=-1).indices
    assert torch.equal(stock.sort(-1).values[:, 9:].long(), ours.sort(-1).values[:, 9:])


def test_dense_selection_is_ordinary_attention():
    model = RECIPES["tiny-glm-dsa"].build()
    ids = torch.randint(0, VOCAB_SIZE, (1, 60), generator=torch.Generator().manual_seed(1))
    full = model(ids).logits  # top-k 256: everything
    with dense_selection(model):
        assert torch.equal(model(ids).logits, full)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 5
    assert not torch.allclose(model(ids).logits, full)
    with dense_selection(model):
        assert torch.equal(model(ids).logits, full)


def short(name: str) -> Any:
    sparse = {"copying_steps": 2, "index_steps": 2, "sparse_steps": 1} if name == "tiny-glm-dsa" else {}
    return dataclasses.replace(
        RECIPES[name], max_steps=3, cooldown_steps=1, cooldown_tokens=90, batch_tokens=256, **sparse
    )


def test_training_repeats_bitwise_and_teaches_the_index():
    runs = [Training(short("tiny-glm-dsa")) for _ in range(2)]
    before = {name: parameter.clone() for name, parameter in runs[0].model.named_parameters()}
    steps = [[dataclasses.replace(step, cpu_seconds=0.0) for step in run.steps()] for run in runs]
    assert steps[0] == steps[1]
    assert [step.stage for step in steps[0]] == ["copying"] * 2 + ["curriculum"] * 3 + ["cooldown"] + ["index"] * 2 + [
        "sparse"
    ]
    for (name, one), other in zip(runs[0].model.named_parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(one, other), name
    moved = {name for name, parameter in runs[0].model.named_parameters() if not torch.equal(parameter, before[name])}
    assert any("indexer" in name for name in moved)


def test_a_model_is_saved_whole_and_nothing_is_overwritten(tmp_path: Path):
    folder = tmp_path / "models" / "mine"
    made = make.make_model(short("tiny-hybrid"), folder, measuring=lambda policy: [])
    again = load_policy(folder)
    for one, other in zip(made.policy.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]
    with pytest.raises(InvalidInputError, match="exists; nothing is overwritten"):
        make.make_model(short("tiny-hybrid"), folder)


def test_ctrl_c_keeps_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps = Training.steps

    def interrupted(self: Training) -> Any:
        yield next(steps(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "steps", interrupted)
    made = make.make_model(short("tiny-hybrid"), tmp_path / "model", measuring=lambda policy: [])
    assert made.interrupted
    assert len(made.steps) == 1
    assert json.loads((tmp_path / "model" / "training.json").read_text())["interrupted"] is True


def test_greedy_and_sampled_rewards():
    policy = Policy(RECIPES["tiny-hybrid"].build().eval(), library_tokenizer())
    found = measure(policy, prompt_tokens=[200], num_tasks=2, num_needles=2, sampled_tokens=200, group=3)
    assert [case.answer_style for case in found] == ["token", "sentence"]
    assert all(case.greedy == 0.0 and case.sampled is not None for case in found)
    task = {"prompt": "question : what is the code of bird ? answer :", "answer": "red"}
    one, other = (evaluation.rewards_of(policy, task, group=4, seed=3) for _ in range(2))
    assert one == other


def test_the_command_refuses_an_unknown_name(capsys: pytest.CaptureFixture[str]):
    assert main(["tiny"]) == 2
    assert "there are tiny-hybrid" in capsys.readouterr().err
