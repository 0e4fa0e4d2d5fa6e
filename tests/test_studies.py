"""The start notebook's measurements, on cases with a known answer."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from workbench import capture_prompt, sample_responses, studies
from workbench.documents import library_task
from workbench.studies import (
    StartParameters,
    check_against_autograd,
    compare_gradients,
    mean_changes,
    open_policy,
    run_scopes,
    take_gradient,
)

GIVEN = {
    "setting": "tiny", "prompt_tokens": 700, "group_size": 3, "max_new_tokens": 5, "chunk_tokens": 200, "lora_rank": 2,
    "learning_rate": 1e-3, "temperature": 1.0, "check_tokens": 700, "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"setting": "huge"}, "gemma3-270m"),
        ({"group_size": 1}, "greater than or equal to 2"),
        ({"prompt_tokens": "many"}, "valid integer"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"group_sise": 4}, "Extra inputs"),
    ],
)
def test_wrong_parameters_stop_the_notebook(change, message):
    with pytest.raises(ValidationError, match=message):
        StartParameters(**GIVEN | change)


@pytest.mark.parametrize(("size", "sizes"), [(2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])])
def test_group_sizes_double_up_to_the_group(size, sizes):
    assert StartParameters(**GIVEN | {"group_size": size}).group_sizes() == sizes


def test_gradients_are_compared_as_vectors():
    right = {"m.layers.0.a": torch.tensor([3.0, 0.0]), "m.layers.1.a": torch.tensor([[4.0]])}
    found = {"m.layers.0.a": torch.tensor([0.0, 3.0]), "m.layers.1.a": torch.tensor([[4.0]])}
    comparison = compare_gradients(found, right)
    assert comparison.cosine == pytest.approx(16 / 25)
    assert comparison.relative_l2 == pytest.approx(18**0.5 / 5)
    assert comparison.norm_ratio == pytest.approx(1.0)
    assert comparison.by_layer == {0: pytest.approx(2**0.5), 1: 0.0}


def test_mean_changes_are_per_response():
    before = [torch.tensor([-1.0, -3.0]), torch.tensor([-2.0])]
    after = {"full": [torch.tensor([-1.0, -1.0]), torch.tensor([-3.0])]}
    assert mean_changes(before, after) == {"full": [1.0, -1.0]}


@pytest.fixture(scope="module")
def tiny():
    parameters = StartParameters(**GIVEN)
    policy = open_policy(parameters)
    task = library_task(policy.tokenizer, parameters.prompt_tokens)
    state = capture_prompt(policy, task.prompt_ids, chunk_tokens=parameters.chunk_tokens)
    responses = sample_responses(policy, state, 3, max_new_tokens=parameters.max_new_tokens, seed=0)
    return parameters, policy, task, state, responses


def test_runs_leave_weights_and_gradients_alone(tiny):
    parameters, policy, task, state, responses = tiny
    version = policy.weight_version
    runs = run_scopes(policy, state, task, responses, [0.0, 1.0, 0.0], parameters)
    assert [(run.gradient_scope, run.group_size) for run in runs] == [
        (scope, size) for scope in ("response_only", "full") for size in (1, 2, 3)
    ]
    assert policy.weight_version == version
    assert all(parameter.grad is None for _, parameter in policy.trainable_parameters())
    assert all(float(compare_gradients(run.gradient, run.gradient).cosine) == pytest.approx(1.0) for run in runs)


def test_evidence_is_what_the_checks_measured(tiny, monkeypatch):
    parameters, policy, task, _, responses = tiny
    assert check_against_autograd(policy, task, responses, parameters)["level"] == 4

    def spoiled(policy):
        gradient = take_gradient(policy)
        spoiled.calls += 1
        return {name: value * (1.01 if spoiled.calls == 1 else 1.0) for name, value in gradient.items()}

    spoiled.calls = 0
    monkeypatch.setattr(studies, "take_gradient", spoiled)
    evidence = check_against_autograd(policy, task, responses, parameters)
    assert evidence["level"] == 2
    assert evidence["checks"][-1]["measured"] == pytest.approx(0.01, rel=1e-2)
    assert not evidence["checks"][-1]["passed"]
