"""The gradient-cost study: its comparisons on a known case, and that `Sampled` is unbiased, seen over draws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.helpers import Snapshot, float64_arithmetic, tiny_policy, token_ids
from workbench import InvalidInputError, Sampled, prompt_gradient, update_step
from workbench.gradients import take_gradient
from workbench.recordings import load_recording
from workbench.scope_problems import ScopeParameters, middle_setting, open_group, settings
from workbench.scope_study import (
    convergence_exponent,
    means_by,
    record,
    recorded_or_measured,
    scope_rows,
    scope_table,
)

SMALL: dict[str, Any] = {
    "models": ("random:qwen3",), "seeds": (0,), "prompt_tokens": (600,), "response_tokens": (3,),
    "learning_rates": (0.0, 0.01), "num_updates": 1, "tails": (1, 3), "fractions": (0.5,), "num_draws": 2,
    "adapter_scopes": (), "group_size": 2, "chunk_tokens": 200, "lora_rank": 2,
}  # fmt: skip


# ---------------------------------------------------------------- Sampled is unbiased


def draws(fraction: float, count: int) -> tuple[Tensor, Tensor]:
    """[count, parameters] gradients of Sampled(fraction), and the full one, float64."""
    policy = tiny_policy("qwen3", torch.float64)
    prompt, responses = token_ids(33), [token_ids(3, seed=1)]

    def gradient(scope: Any) -> Tensor:
        update_step(
            policy, prompt, responses, advantages=[1.0], gradient_scope=scope, chunk_tokens=8, measure_memory=False
        )  # fmt: skip
        return torch.cat([g.reshape(-1) for g in take_gradient(policy).values()])

    with float64_arithmetic():
        return torch.stack([gradient(Sampled(fraction, seed=s)) for s in range(count)]), gradient("full")


def exponent(found: Tensor, full: Tensor) -> float:
    """Slope of the root-mean-square error of means of n draws against n, both logarithmic."""
    errors = {}
    for n in (1, 2, 4, 8):
        means = found[: len(found) // n * n].reshape(-1, n, found.shape[1]).mean(dim=1)
        errors[n] = float((means - full).norm(dim=1).square().mean().sqrt() / full.norm())
    return convergence_exponent(errors)


def test_the_mean_of_sampled_gradients_converges_as_one_over_sqrt_n(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 draws, two chunks in four on average. Measured exponent -0.56; without the scale by 1 / f it is -0.09."""
    found, full = draws(0.5, 96)
    assert abs(exponent(found, full) + 0.5) < 0.12
    assert float((found[0] - full).norm() / full.norm()) > 0.1  # one draw is far off

    def unscaled(scope: Any, state: Any, original: Any = prompt_gradient.plan_walk) -> Any:
        return prompt_gradient.WalkPlan(original(scope, state).starts)

    monkeypatch.setattr("workbench.update.plan_walk", unscaled)
    biased, full = draws(0.5, 24)
    assert exponent(biased, full) > -0.2


def test_the_exponent_of_exact_power_laws() -> None:
    assert convergence_exponent({n: 3.0 * n**-0.5 for n in (1, 2, 4, 8)}) == pytest.approx(-0.5)
    assert convergence_exponent({1: 1.0, 4: 1.0}) == pytest.approx(0.0)


# ---------------------------------------------------------------- the study


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return list(scope_rows(ScopeParameters(**SMALL)))


def test_every_scope_is_compared_whole_and_by_part(rows: list[Any]) -> None:
    whole = [row for row in rows if row["layer"] is None and row["parameter_family"] == "all"]
    names = ["response_only", "tail:1", "tail:3", "sampled:0.5 x1", "sampled:0.5 x2"]
    assert [(row["learning_rate"], row["scope"]) for row in whole] == [(lr, n) for lr in (0.0, 0.01) for n in names]
    by_scope = {row["scope"]: row for row in whole if row["learning_rate"] == 0.0}
    # Three chunks are the whole prompt: the two walks run the same operations.
    assert by_scope["tail:3"]["relative_l2"] == 0.0
    assert 0.0 < by_scope["tail:1"]["relative_l2"] < by_scope["response_only"]["relative_l2"]
    parts = [row for row in rows if row["learning_rate"] == 0.0 and row["scope"] == "response_only"]
    assert [row["layer"] for row in parts] == [None, 0, 1, None, None]
    assert [row["parameter_family"] for row in parts] == ["all", "all", "all", "attention", "mlp"]
    assert not any(row["layer"] is not None for row in rows if row["learning_rate"] > 0.0)


def test_the_gradient_is_taken_without_a_trace() -> None:
    group = open_group("random:qwen3", ScopeParameters(**SMALL), seed=1)
    before = Snapshot(group.policy.model)
    full = group.gradient("full")
    again = group.gradient("full")
    assert before.differences() == []
    assert all(torch.equal(full[name], again[name]) for name in full)


def test_settings_vary_one_thing_at_a_time() -> None:
    parameters = ScopeParameters(prompt_tokens=(1, 2, 3), response_tokens=(4, 5, 6), learning_rates=(0.0, 0.1))
    assert middle_setting(parameters) == (2, 5, 0.0)
    assert settings(parameters) == [(1, 5, 0), (2, 5, 0), (3, 5, 0), (2, 4, 0), (2, 6, 0), (2, 5, 0.1)]


def test_means_leave_out_what_has_no_value() -> None:
    table = [{"k": 1, "v": 2.0}, {"k": 1, "v": 4.0}, {"k": 1, "v": math.nan}, {"k": 2, "v": None}]
    assert means_by(table, "k", "v") == {1: (2.0, 3.0, 4.0)}


def test_an_interrupted_recording_keeps_its_rows(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, rows: list[Any]
) -> None:
    def interrupted(parameters: Any) -> Any:
        yield from rows[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.scope_study.scope_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(ScopeParameters(**SMALL), tmp_path)
    saved = load_recording(tmp_path / "gradient_scope.json")
    assert saved.rows == rows[:3]
    assert saved.notes[-1].startswith("interrupted")
    assert scope_table(saved)[0][:3] == ["random:qwen3", "response_only", "all"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"chunk_tokens": 0}, "greater than 0"), ({"tail": (1,)}, "Extra inputs"), ({"seeds": ()}, "at least 1")],
)
def test_wrong_parameters_stop_the_notebook(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScopeParameters(**SMALL | change)


def test_an_unknown_random_family_and_a_model_without_a_recording_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="random families are"):
        open_group("random:gpt2", ScopeParameters(**SMALL), seed=0)
    # Either there is no recording yet, or none of a random model.
    with pytest.raises(InvalidInputError, match="set rerun = True"):
        recorded_or_measured(ScopeParameters(**SMALL), rerun=False)
