"""Advantages, losses and their derivatives by log-prob: against values worked out by hand and against a scalar twin.

Tolerances: EXACT for float64 results of a handful of operations (measured at most 3.4e-16 on x86; 1e-12 leaves
room for another summation order and is far below any wrong formula, which differs in the first digits). Advantages are
float32: 1e-7, the rounding of the values here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from workbench.advantages import group_advantages, reward_notes, zero_variance_members
from workbench.config import KL_ESTIMATORS, LOSSES, ObjectiveConfig
from workbench.errors import InvalidInputError, NonFiniteError
from workbench.objective import (
    LOG_RATIO_CAP,
    StepDenominators,
    TokenSums,
    aggregate_metrics,
    kl_terms,
    loss_and_coefficients,
    member_loss,
)

EXACT = 1e-12
ONE_MEMBER = StepDenominators(num_members=1, total_tokens=3)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def config_of(loss: str, **fields) -> ObjectiveConfig:
    return ObjectiveConfig(loss=loss, max_response_tokens=10 if loss == "dr_grpo" else None, **fields)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    assert actual.shape == expected.shape
    assert bool(((actual.double() - expected.double()).abs() <= tolerance).all()), (actual, expected)


# ---------------------------------------------------------------- advantages (cases 1 to 3)


@pytest.mark.parametrize(
    ("rewards", "scale", "expected"),
    [
        ([1, 1, 1, 1], "group", [0, 0, 0, 0]),
        ([1, 0, 0, 0], "group", [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], "none", [0.75, -0.25, -0.25, -0.25]),
        ([1, 0, 0, 0], "batch", [1.5, -0.5, -0.5, -0.5]),  # one group is the batch
        ([None, 1, 0], "group", [0, 0.70710678, -0.70710678]),
        ([math.nan, 1, 0], "group", [0, 0.70710678, -0.70710678]),
        ([None, None, 1], "group", [0, 0, 0]),
        ([None, None, 1], "none", [0, 0, 0]),
        ([None, None], "batch", [0, 0]),
        ([7.0], "group", [0]),
        ([7.0], "none", [0]),
        ([], "group", []),
        ([True, False], "none", [0.5, -0.5]),
    ],
)
def test_advantages_of_one_group(rewards, scale, expected):
    advantages = group_advantages(rewards, scale=scale)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, abs=1e-7)
    # "Exactly 0" is exact: no rounding residue where nothing is to be learned.
    assert all(a == 0.0 for a, e in zip(advantages.tolist(), expected, strict=True) if e == 0)


def test_the_default_is_the_sample_standard_deviation_not_the_populations():
    population = [1.7320508, -0.5773503, -0.5773503, -0.5773503]
    assert group_advantages([1, 0, 0, 0]).tolist() != pytest.approx(population, abs=0.2)


def test_groups_need_not_be_adjacent_and_do_not_mix():
    together = group_advantages([1, 0, 5, 9, 0, 0], group_ids=["a", "a", "b", "b", "a", "a"])
    apart = torch.cat([group_advantages([1, 0, 0, 0]), group_advantages([5, 9])])
    assert together[[0, 1, 4, 5, 2, 3]].tolist() == apart.tolist()


def test_batch_scale_centres_by_group_and_divides_by_the_deviation_of_all_valid_rewards():
    rewards = [0.0, 2.0, 10.0, 14.0, None]  # mean 6.5, squares 42.25 + 20.25 + 12.25 + 56.25 = 131
    deviation = math.sqrt(131 / 3)
    advantages = group_advantages(rewards, group_ids=torch.tensor([3, 3, 7, 7, 7]), scale="batch")
    assert advantages.tolist() == pytest.approx(
        [-1 / deviation, 1 / deviation, -2 / deviation, 2 / deviation, 0], abs=1e-7
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_is_exactly_zero_beside_one_that_is_not(scale):
    rewards = [0.1, 0.1, 0.1, 0.0, 1.0]
    assert float(sum([0.1, 0.1, 0.1]) / 3 - 0.1) != 0.0  # the trap: the mean of equal numbers need not be that number
    advantages = group_advantages(rewards, group_ids=[0, 0, 0, 1, 1], scale=scale)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[4] > 0.4


def test_rewards_that_differ_by_rounding_only_are_equal():
    rewards = [0.3, 0.1 + 0.2]
    assert rewards[0] != rewards[1]  # else the test is void; divided by their deviation they would be -0.7 and 0.7
    assert group_advantages(rewards).tolist() == [0.0, 0.0]
    assert zero_variance_members(rewards) == (True, True)
    assert group_advantages([0.3, 0.3 + 1e-12]).tolist() == pytest.approx([-0.7071068, 0.7071068], abs=1e-4)


def test_eps_is_added_to_the_standard_deviation():
    assert group_advantages([1, 0, 0, 0], eps=0.5).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages([3, 3], eps=0.5).tolist() == [0.0, 0.0]


def test_a_reward_tensor_is_read_without_a_graph():
    rewards = torch.tensor([1.0, 0.0, math.nan], requires_grad=True)
    advantages = group_advantages(rewards)
    assert not advantages.requires_grad
    assert advantages.tolist() == pytest.approx([0.70710678, -0.70710678, 0], abs=1e-7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": [1.0, math.inf]}, "reward of response 1 is inf"),
        ({"rewards": [1.0, -1e39]}, "reward of response 1 is -1e\\+39"),
        ({"rewards": [[1.0], [2.0]]}, "numbers or None"),
        ({"rewards": ["good"]}, "numbers or None"),
        ({"rewards": torch.ones(2, 2)}, r"1-D.*\(2, 2\)"),
        ({"rewards": [1.0, 2.0], "group_ids": [0]}, "2 rewards but 1 group_ids"),
        ({"rewards": [1.0, 2.0], "scale": "global"}, "scale='global'"),
        ({"rewards": [1.0, 2.0], "eps": -1.0}, "eps=-1.0"),
    ],
)
def test_wrong_rewards_are_refused(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        group_advantages(arguments.pop("rewards"), **arguments)


def test_the_report_says_in_words_which_groups_teach_nothing_and_which_members_can_be_dropped():
    rewards = [1, 1, 1, 1, 0, 1, None, 5, None]
    groups = ["a", "a", "a", "a", "b", "b", "b", "c", "d"]
    assert reward_notes(rewards, group_ids=groups) == [
        "no reward for response 6, 8: left out of its group's statistics, advantage 0",
        "all 4 valid rewards of group a are equal: nothing to learn from it",
        "group c has only one valid reward: nothing to learn from it",
        "group d has no valid reward: nothing to learn from it",
    ]
    assert zero_variance_members(rewards, group_ids=groups) == (True,) * 4 + (False,) * 3 + (True,) * 2


# ---------------------------------------------------------------- a scalar twin


def member_loss_reference(logp, old, ref, mask, advantage, config, num_members, total_tokens):
    """Loss and derivative of one member in plain Python floats: the formulas, written once more token by token."""
    tokens = [t for t in range(len(logp)) if mask[t]]
    count = len(tokens)
    weight = {
        "grpo": 1 / num_members / max(1, count),
        "gspo": 1 / num_members / max(1, count),
        "dapo": 1 / max(1, total_tokens),
        "cispo": 1 / max(1, total_tokens),
        "dr_grpo": 1 / num_members / (config.max_response_tokens or 1),
        "luspo": 1 / num_members,
    }[config.loss]
    loss, gradient = 0.0, [0.0] * len(logp)
    by_sequence = config.loss in ("gspo", "luspo")
    mean_log_ratio = sum(logp[t] - old[t] for t in tokens) / max(1, count)
    for t in tokens:
        ratio = math.exp(mean_log_ratio if by_sequence else logp[t] - old[t])
        if config.loss == "cispo":
            capped = min(ratio, 1 + config.clip_high)
            loss -= weight * capped * advantage * logp[t]
            gradient[t] -= weight * capped * advantage
        else:
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            loss -= weight * min(ratio * advantage, clipped * advantage)
            if ratio * advantage <= clipped * advantage:  # the unclipped branch is the minimum: it has the gradient
                for s in tokens if by_sequence else [t]:
                    gradient[s] -= weight * advantage * ratio / (count if by_sequence else 1)
        d = ref[t] - logp[t]
        kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[config.kl_estimator]
        loss += weight * config.beta * kl
        gradient[t] += weight * config.beta * {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d)}[config.kl_estimator]
    return loss, gradient


MEMBERS = [  # log-probs, old, reference, mask, advantage: ratios inside and beyond both clip bounds, both signs
    ([-1.0, -0.3, -2.0, -0.7], [-1.4, -0.2, -1.5, -0.75], [-1.1, -0.9, -1.0, -0.7], [1, 1, 1, 1], 1.25),
    ([-0.5, -1.2, -3.0], [-0.9, -0.8, -3.05], [-0.5, -2.0, -2.5], [1, 0, 1], -0.8),
    ([-0.4], [-0.45], [-0.6], [1], -0.45),
    ([], [], [], [], 0.7),
    ([-0.4, -0.1], [-1.4, -0.2], [-0.5, -0.5], [0, 0], 0.3),
]
STEP = StepDenominators.from_lengths(sum(mask) for *_, mask, _ in MEMBERS)


def arguments_of(index: int, config: ObjectiveConfig, denominators: StepDenominators = STEP) -> tuple[Tensor, dict]:
    logp, old, ref, mask, advantage = MEMBERS[index]
    return f64(*logp), {
        "old_logprobs": f64(*old),
        "ref_logprobs": f64(*ref),
        "mask": torch.tensor(mask, dtype=torch.bool),
        "advantage": advantage,
        "config": config,
        "denominators": denominators,
        "member": index,
    }


@pytest.mark.parametrize("index", range(len(MEMBERS)))
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_coefficients_equal_the_scalar_twin(loss, estimator, index):
    config = config_of(loss, beta=0.3, kl_estimator=estimator, clip_low=0.1, clip_high=0.2)
    logprobs, arguments = arguments_of(index, config)
    value, coefficients, _ = loss_and_coefficients(logprobs, **arguments)
    expected, gradient = member_loss_reference(*MEMBERS[index], config, STEP.num_members, STEP.total_tokens)
    assert value == pytest.approx(expected, abs=EXACT)
    assert_close(coefficients, f64(*gradient))
    if any(MEMBERS[index][3]):
        assert coefficients.abs().max() > 1e-3  # not a comparison of zeros


def test_the_twin_tells_the_six_losses_apart():
    """No two losses agree on this step, so a mix-up cannot pass unnoticed."""
    results = [step_loss(config_of(loss, clip_low=0.1, clip_high=0.2)) for loss in LOSSES]
    for (first, a), (second, b) in itertools.combinations(zip(LOSSES, results, strict=True), 2):
        assert abs(a - b) > 1e-3, (first, second)


def step_loss(config: ObjectiveConfig, order=(0, 1, 2, 3, 4), denominators: StepDenominators = STEP) -> float:
    total = 0.0
    for index in order:
        logprobs, arguments = arguments_of(index, config, denominators)
        total += loss_and_coefficients(logprobs, **arguments)[0]
    return total


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "cispo"])  # cispo stops a gradient on purpose
def test_the_derivative_is_that_of_the_value(loss):
    config = config_of(loss, beta=0.3, clip_low=0.1, clip_high=0.2)
    logprobs, arguments = arguments_of(0, config)
    leaf = logprobs.requires_grad_()
    # gradcheck's own tolerances for float64 central differences; no ratio is within 1e-6 of a clip bound.
    assert torch.autograd.gradcheck(lambda x: member_loss(x, **arguments).loss, leaf)


# ---------------------------------------------------------------- weights (cases 4 and 5)

A_AND_B = [(f64(-1.0), -4.0), (f64(-1.0, -1.0, -1.0), -1.0)]  # per-token losses [4] and [1, 1, 1] at ratio 1
WORTH_FOUR_AND_ONE = {"grpo": 2.5, "dapo": 1.75, "dr_grpo": 0.35, "gspo": 2.5, "luspo": 3.5, "cispo": -1.75}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("loss", LOSSES)
def test_case_4_weights_in_either_order_and_over_two_ranks(loss, order):
    # cispo's term is -A logp = A at logp = -1: the same weights, with the sign turned.
    per_rank = [StepDenominators.from_lengths([len(A_AND_B[index][0])]) for index in order]
    step = per_rank[0] + per_rank[1]
    assert step == StepDenominators.from_lengths([1, 3]) == StepDenominators(num_members=2, total_tokens=4)
    parts = [
        member_loss(A_AND_B[i][0], advantage=A_AND_B[i][1], config=config_of(loss), denominators=step) for i in order
    ]
    assert float(sum(part.loss for part in parts)) == pytest.approx(WORTH_FOUR_AND_ONE[loss], abs=EXACT)


def test_case_4_needs_the_denominators_of_the_step_not_of_the_rank():
    """Each rank by its own denominators, then averaged: dapo would read 2.5 instead of 1.75."""
    alone = [
        member_loss(x, advantage=a, config=config_of("dapo"), denominators=StepDenominators.from_lengths([len(x)])).loss
        for x, a in A_AND_B
    ]
    assert float(sum(alone)) / 2 == pytest.approx(2.5, abs=EXACT)


def test_case_5_an_empty_response_adds_nothing_to_the_token_mean():
    config = config_of("dapo")
    step = StepDenominators.from_lengths([0, 3])
    empty = loss_and_coefficients(f64(), advantage=-1.0, config=config, denominators=step)
    three = loss_and_coefficients(f64(-1.0, -1.0, -1.0), advantage=-1.0, config=config, denominators=step)
    assert step.total_tokens == 3
    assert (empty[0], three[0]) == (0.0, pytest.approx(1.0, abs=EXACT))
    assert empty[1].shape == (0,)


@pytest.mark.parametrize("loss", LOSSES)
def test_case_5_a_step_without_tokens_is_zero_and_finite(loss):
    config = config_of(loss, beta=0.5)
    step = StepDenominators.from_lengths([0, 0])
    empty, masked = f64(), f64(math.nan, -1.0)
    results = [
        loss_and_coefficients(
            x, ref_logprobs=x, mask=torch.zeros(len(x)), advantage=1.0, config=config, denominators=step
        )
        for x in (empty, masked)
    ]
    for value, coefficients, _ in results:
        assert value == 0.0
        assert coefficients.count_nonzero() == 0
    metrics = aggregate_metrics(sums for *_, sums in results)
    assert all(math.isfinite(number) for number in metrics.values() if not isinstance(number, list))
    assert (metrics["ratio_mean"], metrics["num_tokens"]) == (1.0, 0)


def test_denominators_that_cannot_include_the_member_are_refused():
    with pytest.raises(InvalidInputError, match="2 tokens cannot include a member of 3"):
        member_loss(f64(-1, -1, -1), advantage=1.0, config=config_of("dapo"), denominators=StepDenominators(1, 2))
    with pytest.raises(InvalidInputError, match="0 members"):
        member_loss(f64(-1.0), advantage=1.0, config=config_of("grpo"), denominators=StepDenominators())
    with pytest.raises(InvalidInputError, match=">= 0"):
        StepDenominators.from_lengths([3, -1])


# ---------------------------------------------------------------- zero advantage (case 1)


@pytest.mark.parametrize("loss", LOSSES)
def test_case_1_equal_rewards_give_no_policy_gradient_and_keep_the_kl_gradient(loss):
    advantage = float(group_advantages([1, 1, 1, 1])[0])
    logprobs = f64(-1.0, -0.2, -3.0)
    arguments = {"old_logprobs": f64(-1.3, -0.1, -9.0), "advantage": advantage, "denominators": ONE_MEMBER}
    value, coefficients, sums = loss_and_coefficients(logprobs, config=config_of(loss), **arguments)
    assert value == 0.0
    assert coefficients.count_nonzero() == 0
    assert (sums.num_clipped_low, sums.num_clipped_high) == (0, 0)
    with_kl = config_of(loss, beta=0.1)
    value, coefficients, _ = loss_and_coefficients(logprobs, ref_logprobs=logprobs - 0.5, config=with_kl, **arguments)
    weight = ONE_MEMBER.token_weight(with_kl, 3)
    assert value == pytest.approx(0.1 * weight * 3 * 0.10653066, rel=1e-7)  # the constant has 8 digits
    assert coefficients.tolist() == pytest.approx([0.1 * weight * 0.39346934] * 3, rel=1e-7)


# ---------------------------------------------------------------- KL (case 6)


@pytest.mark.parametrize(
    ("estimator", "value", "derivative"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.10653066, 0.39346934)]
)
def test_case_6_kl_estimators(estimator, value, derivative):
    logprob = f64(-1.0).requires_grad_()
    kl = kl_terms(logprob, f64(-1.5), estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, abs=5e-9)  # eight digits given
    assert logprob.grad.item() == pytest.approx(derivative, abs=5e-9)


@pytest.mark.parametrize("scale", [10.0, 0.1, 1e-3, 1e-5, 1e-7])
def test_k3_is_never_negative_and_accurate_in_float32_where_the_policies_nearly_agree(scale):
    d = torch.linspace(-1.0, 1.0, 10_001) * scale
    kl = kl_terms(torch.zeros_like(d), d, "k3")
    assert float(kl.min()) >= 0.0
    if scale <= 0.1:
        # expm1(d) - d loses about eps / |d| of d**2 / 2 to rounding; exp(d) - 1 - d would lose eps / d**2.
        truth = torch.expm1(d.double()) - d.double()
        allowed = torch.finfo(torch.float32).eps * d.double().abs() + 1e-45
        assert bool(((kl - truth).abs() <= 2 * allowed).all())
        assert bool(((d.exp() - 1 - d - truth).abs() > 2 * allowed).any())  # the naive formula fails the same check


def test_k3_far_from_the_reference_stays_finite_and_keeps_its_pull_where_it_has_one():
    logprobs = f64(-1000.0, -1e4, -1.0).requires_grad_()
    kl = kl_terms(logprobs, f64(-1.0, -1.0, -1000.0), "k3")
    kl.sum().backward()
    top = math.exp(LOG_RATIO_CAP) - LOG_RATIO_CAP - 1
    assert kl.tolist() == pytest.approx([top, top, 998.0], rel=EXACT)
    assert logprobs.grad.tolist() == [0.0, 0.0, 1.0]  # capped: none; below: that of d -> -infinity


def test_beta_without_a_reference_is_refused():
    with pytest.raises(InvalidInputError, match=r"beta=0\.1 needs reference log-probs; none given for response 5"):
        member_loss(f64(-1.0), advantage=1.0, config=config_of("grpo", beta=0.1), denominators=ONE_MEMBER, member=5)


# ---------------------------------------------------------------- clipping (cases 7 and 8)


def one_token(loss: str, advantage: float, log_ratio: float, **fields) -> tuple[float, float, TokenSums]:
    """Loss, derivative and statistics of a response of one token, log-prob -0.5, in a step of its own."""
    value, coefficients, sums = loss_and_coefficients(
        f64(-0.5),
        old_logprobs=f64(-0.5 - log_ratio),
        advantage=advantage,
        config=config_of(loss, **fields),
        denominators=StepDenominators(1, 1),
    )
    return value, coefficients.item(), sums


@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo", "luspo"])  # all weights are 1 here
@pytest.mark.parametrize(
    ("advantage", "ratio", "objective", "derivative", "clipped"),
    [
        (1.0, 2.0, 1.2, 0.0, (0, 1)),
        (-1.0, 2.0, -2.0, -2.0, (0, 0)),
        (1.0, 0.5, 0.5, 0.5, (0, 0)),
        (-1.0, 0.5, -0.8, 0.0, (1, 0)),
        (1.0, 1.1, 1.1, 1.1, (0, 0)),
    ],
)
def test_case_7_clipping_takes_the_gradient_on_one_side_only(loss, advantage, ratio, objective, derivative, clipped):
    value, coefficient, sums = one_token(loss, advantage, math.log(ratio))
    assert -value == pytest.approx(objective, abs=EXACT)
    assert -coefficient == pytest.approx(derivative, abs=EXACT)
    assert (sums.num_clipped_low, sums.num_clipped_high) == clipped


def test_case_7_clip_bounds_are_two():
    assert one_token("grpo", 1.0, math.log(1.4), clip_low=0.2, clip_high=0.5)[0] == pytest.approx(-1.4, abs=EXACT)
    assert one_token("grpo", -1.0, math.log(0.7), clip_low=0.2, clip_high=0.5)[0] == pytest.approx(0.8, abs=EXACT)


@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_case_7_cispo_caps_the_weight_and_keeps_the_gradient(advantage):
    value, coefficient, sums = one_token("cispo", advantage, math.log(2.0))
    assert coefficient == pytest.approx(-1.2 * advantage, abs=EXACT)
    assert value == pytest.approx(-1.2 * advantage * -0.5, abs=EXACT)
    assert (sums.num_clipped_low, sums.num_clipped_high) == (0, 1)
    below = one_token("cispo", advantage, math.log(0.5))
    assert below[1] == pytest.approx(-0.5 * advantage, abs=EXACT)  # no lower bound
    assert below[2].num_clipped_low == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_at_step_one_the_ratio_is_exactly_one_whatever_the_bounds(loss):
    logprobs = torch.randn(50, generator=torch.Generator().manual_seed(0)) - 2.0
    for old in (None, logprobs.clone()):
        _, coefficients, sums = loss_and_coefficients(
            logprobs,
            old_logprobs=old,
            advantage=1.0,
            config=config_of(loss, clip_low=0.0, clip_high=0.0),
            denominators=StepDenominators(1, 50),
        )
        assert (sums.ratio_min, sums.ratio_max, sums.abs_log_ratio_sum) == (1.0, 1.0, 0.0)
        assert (sums.num_clipped_low, sums.num_clipped_high) == (0, 0)
        assert coefficients.max() < 0.0  # zero-width bounds do not take the gradient of ratio 1


def test_case_8_gspo_clips_the_ratio_of_the_sequence():
    logprobs = f64(-1.0, -4.0, -1.0)
    arguments = {"old_logprobs": logprobs - f64(3.0, -3.0, 0.6), "advantage": 1.0, "denominators": ONE_MEMBER}
    by_sequence = loss_and_coefficients(logprobs, config=config_of("gspo"), **arguments)
    by_token = loss_and_coefficients(logprobs, config=config_of("grpo"), **arguments)
    assert by_sequence[0] == pytest.approx(-1.2, abs=EXACT)
    assert by_token[0] == pytest.approx(-0.8165957, abs=5e-8)  # seven digits given
    assert (by_sequence[2].num_clipped_high, by_token[2].num_clipped_high) == (3, 2)
    # Raw statistics are of the tokens in both.
    assert by_sequence[2].ratio_max == by_token[2].ratio_max == pytest.approx(math.exp(3.0), rel=EXACT)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_case_8_an_extreme_log_ratio_stays_finite_in_value_and_gradient(loss, advantage, log_ratio, dtype):
    logprobs = torch.tensor([-0.5, -0.5], dtype=dtype)
    old = torch.tensor([-0.5 - log_ratio, -0.4], dtype=dtype)
    arguments = {"advantage": advantage, "config": config_of(loss), "denominators": StepDenominators(1, 2)}
    value, coefficients, sums = loss_and_coefficients(logprobs, old_logprobs=old, **arguments)
    assert math.isfinite(value)
    assert bool(coefficients.isfinite().all())
    assert sums.abs_log_ratio_sum == pytest.approx(1000.1, rel=1e-6)  # raw: before any cap
    assert sums.ratio_max == (math.inf if log_ratio > 0 else pytest.approx(math.exp(-0.1), rel=1e-6))


def test_raw_ratios_are_reported_beyond_the_cap_and_the_clip():
    _, _, sums = one_token("grpo", 1.0, 30.0)
    assert sums.ratio_max == pytest.approx(math.exp(30.0), rel=EXACT)
    assert sums.ratio_max > math.exp(LOG_RATIO_CAP)


# ---------------------------------------------------------------- masks and non-finite values (case 9)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bad", [-1e4, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("where", ["new", "old_logprobs", "ref_logprobs"])
def test_case_9_what_stands_in_a_masked_slot_reaches_nothing(loss, bad, where):
    mask = torch.tensor([1, 0, 1])
    arguments = {
        "old_logprobs": f64(-1.1, -2.0, -0.5),
        "ref_logprobs": f64(-0.9, -1.0, -0.8),
        "mask": mask,
        "advantage": 0.7,
        "config": config_of(loss, beta=0.2),
        "denominators": StepDenominators(2, 5),
    }
    logprobs = f64(-1.0, -2.0, -0.6)
    clean = loss_and_coefficients(logprobs, **arguments)
    target = logprobs if where == "new" else arguments[where]
    target[1] = bad
    dirty = loss_and_coefficients(logprobs, **arguments)
    assert clean[0] == dirty[0] != 0.0
    assert torch.equal(clean[1], dirty[1])
    assert dirty[1][1] == 0.0
    assert clean[2] == dirty[2]


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("where", ["new", "old", "reference"])
def test_case_9_in_an_unmasked_slot_it_is_an_error_that_names_response_and_position(bad, where):
    tensors = {"new": f64(-1.0, -2.0, -0.6), "old": f64(-1.0, -2.0, -0.6), "reference": f64(-1.0, -2.0, -0.6)}
    tensors[where][[0, 2]] = bad  # slot 0 is masked, slot 2 is not
    with pytest.raises(NonFiniteError, match=f"{where} log-prob of response 6 at position 2 is {bad}"):
        member_loss(
            tensors["new"],
            old_logprobs=tensors["old"],
            ref_logprobs=tensors["reference"],
            mask=torch.tensor([False, True, True]),
            advantage=1.0,
            config=config_of("grpo"),
            denominators=ONE_MEMBER,
            member=6,
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_tokens_count_nowhere(loss):
    """A masked response is the response without those tokens: in its length, its sequence ratio and its KL."""
    config = config_of(loss, beta=0.3)
    step = StepDenominators(2, 6)
    new, old, ref = f64(-1.0, -9.0, -0.5, -0.7), f64(-1.2, -1.0, -0.4, -0.6), f64(-1.0, -3.0, -1.0, -1.0)
    keep = torch.tensor([True, False, True, True])
    arguments = {"advantage": 0.5, "config": config, "denominators": step}
    masked = loss_and_coefficients(new, old_logprobs=old, ref_logprobs=ref, mask=keep, **arguments)
    short = loss_and_coefficients(new[keep], old_logprobs=old[keep], ref_logprobs=ref[keep], **arguments)
    unmasked = loss_and_coefficients(new, old_logprobs=old, ref_logprobs=ref, **arguments)
    assert masked[0] == short[0]
    assert torch.equal(masked[1][keep], short[1])
    assert abs(masked[0] - unmasked[0]) > 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_logprobs": f64(-1.0)}, r"response 2: old log-prob has shape \(1,\), its log-probs \(2,\)"),
        ({"ref_logprobs": f64(-1.0, -1.0, -1.0)}, "reference log-prob has shape"),
        ({"mask": torch.ones(1, 2)}, r"mask has shape \(1, 2\)"),
        ({"advantage": math.nan}, "advantage of response 2 is nan"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    arguments = {"advantage": 1.0, "config": config_of("grpo"), "denominators": ONE_MEMBER, "member": 2} | changes
    with pytest.raises(InvalidInputError, match=message):
        member_loss(f64(-1.0, -1.0), **arguments)
    with pytest.raises(InvalidInputError, match="must be 1-D"):
        member_loss(torch.zeros(1, 2), **(arguments | {"advantage": 1.0}))


# ---------------------------------------------------------------- duplicates, blocks, dtypes


@pytest.mark.parametrize("loss", LOSSES)
def test_case_10_duplicates_with_opposite_advantages_cancel_at_step_one(loss):
    logprobs = f64(-1.0, -0.3, -2.2)
    step = StepDenominators.from_lengths([3, 3])
    results = [
        loss_and_coefficients(logprobs, advantage=a, config=config_of(loss), denominators=step)
        for a in group_advantages([1.0, 0.0])
    ]
    assert_close(results[0][1] + results[1][1], torch.zeros(3))
    assert results[0][1].abs().min() > 0.03
    metrics = aggregate_metrics(sums for *_, sums in results)
    assert metrics["num_tokens"] == 6  # both copies count


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cuts", [(7,), (1, 6), (3, 3, 1), (1,) * 7])
def test_coefficients_make_the_backward_linear_so_blocks_add_up(loss, cuts):
    """A little model's parameter gradient, from one graph of the whole loss and from blocks in reverse order."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(7, 5, dtype=torch.float64, generator=generator)
    weight = (0.3 * torch.randn(5, dtype=torch.float64, generator=generator)).requires_grad_()
    noise = 0.3 * torch.randn(2, 7, dtype=torch.float64, generator=generator)

    def logprobs_of(rows: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(features[rows] @ weight)

    everything = torch.arange(7)
    start = logprobs_of(everything).detach()
    arguments = {
        "old_logprobs": start + noise[0],
        "ref_logprobs": start + noise[1],
        "advantage": -0.9,
        "config": config_of(loss, beta=0.2),
        "denominators": StepDenominators(3, 20),
    }
    (whole,) = torch.autograd.grad(member_loss(logprobs_of(everything), **arguments).loss, weight)
    _, coefficients, _ = loss_and_coefficients(start, **arguments)
    for rows in reversed(everything.split(list(cuts))):
        (coefficients[rows] * logprobs_of(rows)).sum().backward()
    assert whole.norm() > 1e-3
    assert_close(weight.grad, whole)


def test_the_loss_is_accumulated_in_float32_or_float64_and_needs_no_graph_of_its_input():
    arguments = {"advantage": 1.0, "config": config_of("gspo"), "denominators": ONE_MEMBER}
    for given, used in [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=given)
        _, coefficients, _ = loss_and_coefficients(logprobs, **arguments)
        assert coefficients.dtype == used
        assert not coefficients.requires_grad
        assert member_loss(logprobs, **arguments).loss.dtype == used
        assert not logprobs.requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_coefficients_can_be_had_where_gradients_are_off(context):
    config = config_of("luspo", beta=0.2, kl_estimator="k2")
    logprobs, arguments = arguments_of(0, config)
    expected = loss_and_coefficients(logprobs, **arguments)
    with context():
        logprobs, arguments = arguments_of(0, config)
        inside = loss_and_coefficients(logprobs, **arguments)
    outside = loss_and_coefficients(logprobs, **arguments)  # tensors made there, used here
    for result in (inside, outside):
        assert result[0] == expected[0]
        assert torch.equal(result[1], expected[1])


def test_old_and_reference_get_no_gradient():
    logprobs, arguments = arguments_of(0, config_of("grpo", beta=0.3))
    for name in ("old_logprobs", "ref_logprobs"):
        arguments[name] = arguments[name].requires_grad_()
    member_loss(logprobs.requires_grad_(), **arguments).loss.backward()
    assert logprobs.grad is not None
    assert arguments["old_logprobs"].grad is None
    assert arguments["ref_logprobs"].grad is None


# ---------------------------------------------------------------- order, ranks, metrics


@pytest.mark.parametrize("loss", LOSSES)
def test_the_step_does_not_depend_on_order_or_on_the_split_into_ranks(loss):
    config = config_of(loss, beta=0.3)
    lengths = [sum(mask) for *_, mask, _ in MEMBERS]
    ranks = [[0, 3], [4, 1, 2]]
    merged = sum((StepDenominators.from_lengths(lengths[i] for i in rank) for rank in ranks), StepDenominators())
    assert merged == STEP
    one = step_loss(config)
    assert step_loss(config, order=reversed(range(len(MEMBERS)))) == pytest.approx(one, abs=EXACT)
    assert sum(step_loss(config, rank, merged) for rank in ranks) == pytest.approx(one, abs=EXACT)


def test_metrics_are_means_over_the_tokens_of_the_step():
    config = config_of("grpo", clip_low=0.1, clip_high=0.2)
    sums = [loss_and_coefficients(x, **arguments)[2] for x, arguments in (arguments_of(i, config) for i in range(5))]
    metrics = aggregate_metrics(sums, finished=[True, False, True, True, False])
    kept = [(p, o, r, a) for lp, old, ref, m, a in MEMBERS for p, o, r, k in zip(lp, old, ref, m, strict=True) if k]
    ratios = [math.exp(p - o) for p, o, _, _ in kept]
    assert metrics["num_tokens"] == len(kept) == 7
    assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / 7, rel=EXACT)
    assert (metrics["ratio_max"], metrics["ratio_min"]) == pytest.approx((max(ratios), min(ratios)), rel=EXACT)
    assert metrics["abs_log_ratio_mean"] == pytest.approx(sum(abs(p - o) for p, o, _, _ in kept) / 7, rel=EXACT)
    assert metrics["kl_mean"] == pytest.approx(sum(math.exp(r - p) - (r - p) - 1 for p, _, r, _ in kept) / 7, rel=1e-11)
    high = sum(ratio > 1.2 and a > 0 for ratio, (*_, a) in zip(ratios, kept, strict=True))
    low = sum(ratio < 0.9 and a < 0 for ratio, (*_, a) in zip(ratios, kept, strict=True))
    assert (metrics["clip_fraction_high"], metrics["clip_fraction_low"]) == (high / 7, low / 7)
    assert high > 0
    assert metrics["num_truncated_members"] == 2
    assert metrics["notes"] == []


def test_sums_merge_in_any_order():
    config = config_of("grpo")
    sums = [loss_and_coefficients(x, **arguments)[2] for x, arguments in (arguments_of(i, config) for i in range(5))]
    for order in itertools.permutations(sums):
        merged = sum(order, TokenSums())
        expected = sum(sums, TokenSums())
        assert merged.ratio_sum == pytest.approx(expected.ratio_sum, rel=EXACT)
        assert replace(merged, ratio_sum=0, abs_log_ratio_sum=0, kl_sum=0) == replace(
            expected, ratio_sum=0, abs_log_ratio_sum=0, kl_sum=0
        )


def test_kl_is_reported_with_beta_zero_and_absent_without_a_reference():
    logprobs, arguments = arguments_of(0, config_of("grpo"))
    with_reference = loss_and_coefficients(logprobs, **arguments)
    without = loss_and_coefficients(logprobs, **(arguments | {"ref_logprobs": None}))
    assert with_reference[0] == without[0]
    assert aggregate_metrics([with_reference[2]])["kl_mean"] > 0.01
    assert "kl_mean" not in aggregate_metrics([without[2]])


def test_metrics_count_members_and_say_in_words_what_teaches_nothing():
    rewards, groups = [1, 1, 0, 1, None], [0, 0, 1, 1, 1]
    kept = aggregate_metrics([], rewards=rewards, group_ids=groups, config=ObjectiveConfig())
    assert (kept["num_excluded_members"], kept["reward_mean"]) == (1, 0.75)
    assert kept["notes"] == [
        "no reward for response 4: left out of its group's statistics, advantage 0",
        "all 2 valid rewards of group 0 are equal: nothing to learn from it",
    ]
    assert "num_dropped_members" not in kept
    dropping = ObjectiveConfig(drop_zero_variance_groups=True)
    dropped = aggregate_metrics([], rewards=rewards, group_ids=groups, config=dropping)
    assert dropped["num_dropped_members"] == 2
    assert dropped["notes"][-1] == "2 members of such groups were dropped (drop_zero_variance_groups)"
    assert aggregate_metrics([], rewards=[None])["reward_mean"] == 0.0
