"""One step: all or nothing, bad input refused before anything runs, gradients that add up, one optimizer call.

Equalities are bitwise, or float64 with the measured error beside the bound. That the gradient is the right one is shown
in test_gradient_parity.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.helpers import Snapshot, float64_arithmetic, lora_policy, tiny_policy, token_ids
from workbench import (
    InvalidInputError,
    NonFiniteError,
    ObjectiveConfig,
    Policy,
    Response,
    Sampled,
    StaleStateError,
    StepReport,
    Tail,
    WorkbenchError,
    capture_prompt,
    score_responses,
    update_step,
)

ADAPTERS = pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "glm_moe_dsa"])
PROMPT = token_ids(22)
A, B, C = token_ids(7, seed=1), token_ids(4, seed=2), token_ids(1, seed=3)


def step(policy: Policy, responses: list[Any] | None = None, prompt: Any = PROMPT, **options: Any) -> StepReport:
    """Chunks of 8 (three), blocks of 3. Default: A, B, C with three different advantages."""
    if responses is None:
        responses = [A, B, C]
    if "rewards" not in options and "advantages" not in options:
        options["advantages"] = [1.0, -0.5, 0.7][: len(responses)]
    settings = {"chunk_tokens": 8, "block_tokens": 3, "measure_memory": False}
    return update_step(policy, prompt, responses, **settings | options)


def sgd(policy: Policy, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in policy.trainable_parameters()], lr=lr)


def gradients_of(policy: Policy, *args: Any, **options: Any) -> oracle.Gradients:
    step(policy, *args, **options)
    return oracle.take_gradients(policy.model)


def same(a: oracle.Gradients, b: oracle.Gradients) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- bad input changes nothing


def stale_state(policy: Policy) -> dict[str, Any]:
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    policy._weight_version += 1  # as if somebody had updated the weights: it was captured one version ago
    return {"state": state}


def state_of(prompt: Tensor, **options: Any) -> Callable[[Policy], dict[str, Any]]:
    return lambda policy: {"state": capture_prompt(policy, prompt, chunk_tokens=8, **options)}


def foreign_optimizer(policy: Policy) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)}


def frozen(policy: Policy) -> dict[str, Any]:
    policy.model.requires_grad_(False)
    return {}


BAD: list[tuple[str, Any, type[WorkbenchError], str]] = [
    ("empty prompt", {"prompt": []}, InvalidInputError, "prompt_ids is empty"),
    (
        "float prompt",
        {"prompt": [5.0]},
        InvalidInputError,
        "prompt_ids has dtype torch.float32; token ids are integers",
    ),
    ("prompt outside", {"prompt": [5, 101]}, InvalidInputError, "prompt_ids: id 101 at position 1 is outside"),
    ("2-D prompt", {"prompt": PROMPT[None]}, InvalidInputError, r"shape \(1, 22\)"),
    ("no responses", {"responses": []}, InvalidInputError, "responses is empty"),
    ("one tensor", {"responses": A}, InvalidInputError, "must be a list of responses, one per member, not a Tensor"),
    ("float response", {"responses": [A, B.float(), C]}, InvalidInputError, "response 1 has dtype torch.float32"),
    ("response outside", {"responses": [A, [5, -1], C]}, InvalidInputError, "response 1: id -1 at position 1"),
    (
        "too long",
        {"responses": [A, token_ids(19), C]},
        InvalidInputError,
        r"response 1 has 41 positions, .*max_position_embeddings of 40; .*max_positions=N",
    ),
    ("rewards missing", {"rewards": [1.0, 0.0]}, InvalidInputError, "3 responses but 2 rewards: give one per response"),
    ("advantages missing", {"advantages": [1.0]}, InvalidInputError, "3 responses but 1 advantages"),
    (
        "both",
        {"rewards": [1, 0, 0], "advantages": [1, 0, 0]},
        InvalidInputError,
        "exactly one of rewards and advantages",
    ),
    ("neither", {"advantages": None}, InvalidInputError, "exactly one of rewards and advantages"),
    ("one number", {"rewards": 1.0}, InvalidInputError, "rewards must be a sequence, one per response; got 1.0"),
    ("0-d advantages", {"advantages": torch.tensor(1.0)}, InvalidInputError, "advantages must be a sequence"),
    ("NaN advantage", {"advantages": [1.0, math.nan, 0.0]}, InvalidInputError, "advantages must be finite numbers"),
    ("inf advantage", {"advantages": [1.0, math.inf, 0.0]}, InvalidInputError, "advantages must be finite numbers"),
    ("2-D advantages", {"advantages": torch.ones(3, 1)}, InvalidInputError, "advantages must be finite numbers"),
    ("text advantages", {"advantages": ["a", "b", "c"]}, InvalidInputError, "advantages must be numbers"),
    ("inf reward", {"rewards": [1.0, math.inf, 0.0]}, InvalidInputError, "reward of response 1 is inf"),
    ("text rewards", {"rewards": ["a", "b", "c"]}, InvalidInputError, "rewards must be numbers or None"),
    ("2-D rewards", {"rewards": torch.ones(3, 1)}, InvalidInputError, "rewards must be 1-D"),
    ("objective", {"objective": "dapo"}, InvalidInputError, "objective='dapo' is not an ObjectiveConfig"),
    ("scope", {"gradient_scope": "prompt"}, InvalidInputError, "gradient_scope='prompt' is not one of 'full'"),
    ("chunk", {"chunk_tokens": 0}, InvalidInputError, "chunk_tokens=0 must be an integer >= 1"),
    ("block", {"block_tokens": 2.5}, InvalidInputError, "block_tokens=2.5 must be an integer >= 1"),
    ("placement", {"placement": "disk"}, InvalidInputError, "placement='disk' is not one of device, host"),
    ("ranks", {"comm": object()}, InvalidInputError, "comm is a object; workbench.parallel.open_mesh"),
    ("nothing to train", frozen, InvalidInputError, "no trainable parameter"),
    ("foreign optimizer", foreign_optimizer, InvalidInputError, "holds none of the policy's trainable parameters"),
    ("no reference", {"objective": ObjectiveConfig(beta=0.1)}, InvalidInputError, "beta=0.1 needs a reference"),
    ("old missing", {"old_logprobs": [torch.zeros(7)]}, InvalidInputError, "3 responses but 1 old_logprobs"),
    ("old number", {"old_logprobs": 0.5}, InvalidInputError, "old_logprobs must be a sequence"),
    ("old text", {"old_logprobs": ["a", "b", "c"]}, InvalidInputError, "old_logprobs must be tensors of numbers"),
    (
        "old shape",
        {"old_logprobs": [torch.zeros(7), torch.zeros(5), torch.zeros(1)]},
        InvalidInputError,
        r"old_logprobs of response 1 have shape \(5,\), its ids \(4,\)",
    ),
    *(
        (
            f"old {value}",
            {"old_logprobs": [torch.zeros(7), torch.tensor([0.0, 0.0, value, 0.0]), torch.zeros(1)]},
            NonFiniteError,
            f"old_logprobs of response 1 at position 2: {value}",
        )
        for value in (math.nan, -math.inf)
    ),
    ("stale", stale_state, StaleStateError, "captured at weight version 0, the policy is at 1"),
    ("other prompt", state_of(PROMPT.flip(0)), InvalidInputError, "captured from another prompt"),
    ("no boundaries", state_of(PROMPT, keep_boundaries=False), InvalidInputError, "keep_boundaries=True"),
    # options that would reach nothing
    ("clip without optimizer", {"objective": ObjectiveConfig(max_grad_norm=1.0)}, InvalidInputError, "reaches nothing"),
    ("stale without state", {"allow_stale": True}, InvalidInputError, "allow_stale reaches nothing"),
    (
        "drop advantages",
        {"objective": ObjectiveConfig(drop_zero_variance_groups=True)},
        InvalidInputError,
        "nothing when",
    ),
    (
        "chunks of a state",
        lambda policy: state_of(PROMPT)(policy) | {"chunk_tokens": 7},
        InvalidInputError,
        "chunk_tokens=7 reaches nothing: the given state has chunks of 8",
    ),
    (
        "placement of a state",
        lambda policy: state_of(PROMPT)(policy) | {"placement": "host"},
        InvalidInputError,
        "placement='host' reaches nothing",
    ),
]


@pytest.mark.parametrize(("given", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_refused_before_anything_runs_and_changes_nothing(given, error, message, monkeypatch):
    policy = tiny_policy("llama", max_position_embeddings=40)
    step(policy)  # leaves gradients, which must survive
    options = given(policy) if callable(given) else dict(given)
    before, version = Snapshot(policy.model), policy.weight_version
    monkeypatch.setattr(policy.adapter, "forward_chunk", lambda *a, **k: pytest.fail("a forward pass ran"))
    with pytest.raises(error, match=message):
        step(policy, **options)
    assert before.differences() == []
    assert policy.weight_version == version


def test_the_same_calls_without_the_mistake_do_run():
    """The tripwires above are live: without a mistake the step runs, and changes gradients."""
    policy = tiny_policy("llama", max_position_embeddings=40)
    before = Snapshot(policy.model)
    step(policy, [A, token_ids(18), C], state=capture_prompt(policy, PROMPT, chunk_tokens=8), chunk_tokens=8)
    assert before.differences()


@pytest.mark.parametrize("chunks", [-1, True, 1.5, "2", None])
def test_tails_that_make_no_sense(chunks):
    with pytest.raises(InvalidInputError, match="chunks must be an integer >= 0"):
        Tail(chunks)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, math.nan, True, "half", None])
def test_fractions_that_make_no_sense(fraction):
    with pytest.raises(InvalidInputError, match=r"fraction must be in \(0, 1\]"):
        Sampled(fraction)


@pytest.mark.parametrize("seed", [0.5, True, None])
def test_seeds_that_make_no_sense(seed):
    with pytest.raises(InvalidInputError, match="seed must be an integer"):
        Sampled(0.5, seed)


# ---------------------------------------------------------------- all or nothing


class Tripwire(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        pytest.fail("the optimizer was called")


def poisoned(policy: Policy) -> list[Tensor]:
    """Member 1 holds the only occurrence of a token whose embedding is NaN; members 0 and 2 are fine."""
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[50] = torch.nan
    clean = [torch.where(ids == 50, 51, ids) for ids in (A, B, C)]
    clean[1][2] = 50  # an input of the second block
    return clean


@ADAPTERS
@pytest.mark.parametrize("earlier", [False, True], ids=["no gradients before", "gradients before"])
def test_nan_in_the_second_member_undoes_the_first(family, earlier):
    policy, prompt = tiny_policy(family, tie_word_embeddings=False), torch.where(PROMPT == 50, 51, PROMPT)
    if earlier:
        step(policy, prompt=prompt)
    responses = poisoned(policy)
    optimizer = Tripwire([p for _, p in policy.trainable_parameters()], lr=0.1)
    before, version = Snapshot(policy.model), policy.weight_version
    with pytest.raises(NonFiniteError, match=r"^response 1, tokens \[3, 4\): .* output of layer 0"):
        step(policy, responses, prompt, optimizer=optimizer)
    assert [name for name in before.differences() if "embed_tokens" not in name] == []  # NaN differs from itself
    gradient = policy.model.get_input_embeddings().weight.grad
    assert (gradient is not None) is earlier
    assert policy.weight_version == version


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_kept(value):
    policy = tiny_policy("llama")
    step(policy)
    name, parameter = policy.trainable_parameters()[5]
    handle = parameter.register_hook(lambda gradient: gradient * value)
    optimizer = Tripwire([p for _, p in policy.trainable_parameters()], lr=0.1)
    before = Snapshot(policy.model)
    with pytest.raises(NonFiniteError, match=f"the gradient of {name} is not finite; gradients were left as before"):
        step(policy, optimizer=optimizer)
    handle.remove()
    assert before.differences() == []


def small_step(policy: Policy, **options: Any) -> StepReport:
    """Two chunks, and members of two blocks and one."""
    return step(policy, [B, C], PROMPT[:10], **options)


@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["whole graph", "layer by layer"])
def test_ctrl_c_in_any_forward_pass_leaves_everything_as_it_was(family, checkpoint, monkeypatch):
    """Interrupted at the first pass, the second, ... the last: in the reference's capture (2) and scores (3), the
    policy's capture (2), each replay (3 and 1) and the walk through the prompt (2)."""
    policy = lora_policy(family, trained=True)
    options = {"objective": ObjectiveConfig(beta=0.1), "checkpoint_layers": checkpoint}
    small_step(policy)  # leaves gradients, which must survive
    before, version = Snapshot(policy.model), policy.weight_version
    tripwire = Tripwire([p for _, p in policy.trainable_parameters()], lr=0.1)
    forward, countdown = policy.adapter.forward_chunk, [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] < 0:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(policy.adapter, "forward_chunk", interrupted)
    for survived in range(13):
        countdown[0] = survived
        with pytest.raises(KeyboardInterrupt):
            small_step(policy, optimizer=tripwire, **options)
        assert before.differences() == []
        assert policy.model.active_adapters == ["default"]
        assert policy.weight_version == version
    countdown[0] = 13
    small_step(policy, **options)
    assert countdown[0] == 0
    assert before.differences()


def test_a_failing_optimizer_leaves_earlier_gradients_as_they_were_also_where_the_step_has_none():
    """Clipping writes into what it clips: it must not be the caller's own tensor."""
    policy = tiny_policy("llama")
    policy.model.apart = torch.nn.Parameter(torch.ones(3))  # no pass reaches it
    policy = Policy(policy.model)
    for _, parameter in policy.trainable_parameters():
        parameter.grad = torch.ones_like(parameter)
    before = Snapshot(policy.model)

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError

    optimizer = Failing([p for _, p in policy.trainable_parameters()], lr=0.1)
    with pytest.raises(ArithmeticError):
        small_step(policy, optimizer=optimizer, objective=ObjectiveConfig(max_grad_norm=1e-3))
    assert before.differences() == []
    assert torch.equal(policy.model.apart.grad, torch.ones(3))


def test_clipping_a_float64_model_is_of_float64():
    policy = tiny_policy("llama", torch.float64)
    small_step(policy)
    whole = {name: p.grad.clone() for name, p in policy.trainable_parameters()}
    taken = {}

    class Taking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            taken.update({name: p.grad.clone() for name, p in policy.trainable_parameters()})

    policy.model.zero_grad()
    optimizer = Taking([p for _, p in policy.trainable_parameters()], lr=0.1)
    norm = small_step(policy, optimizer=optimizer, objective=ObjectiveConfig(max_grad_norm=1e-3)).metrics["grad_norm"]
    for name, gradient in whole.items():
        torch.testing.assert_close(taken[name], gradient * (1e-3 / (norm + 1e-6)), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_ctrl_c_in_any_backward_pass_leaves_everything_as_it_was(family):
    """Interrupted whenever a gradient arrives at a norm of layer 0: in each of 3 blocks and 2 chunks."""
    policy = tiny_policy(family)
    small_step(policy)
    before, arrivals, interrupt_at = Snapshot(policy.model), [0], [0]

    def hook(gradient: Tensor) -> None:
        arrivals[0] += 1
        if arrivals[0] == interrupt_at[0]:
            raise KeyboardInterrupt

    handle = policy.model.model.layers[0].input_layernorm.weight.register_hook(hook)
    for number in range(1, 6):
        arrivals[0], interrupt_at[0] = 0, number
        with pytest.raises(KeyboardInterrupt):
            small_step(policy)
        assert before.differences() == []
    arrivals[0], interrupt_at[0] = 0, 6
    small_step(policy)
    assert arrivals[0] == 5
    handle.remove()


# ---------------------------------------------------------------- gradients add up


@ADAPTERS
def test_gradients_add_over_calls(family):
    """Over prompts and groups, without an optimizer: gradient accumulation is calling again."""
    policy = tiny_policy(family, torch.float64)
    other = token_ids(9, seed=7)
    with float64_arithmetic():
        one, two = gradients_of(policy), gradients_of(policy, [B, C], prompt=other)
        step(policy)
        step(policy, [B, C], prompt=other)
        total = oracle.take_gradients(policy.model)
    expected = {name: one.get(name, 0.0) + two.get(name, 0.0) for name in one.keys() | two.keys()}
    assert same(total, expected)  # one addition of the same two numbers


def test_gradients_of_tensors_that_the_caller_holds_are_not_written_to():
    policy = tiny_policy("llama")
    step(policy)
    held = {name: p.grad for name, p in policy.model.named_parameters()}
    copies = {name: gradient.clone() for name, gradient in held.items()}
    step(policy)
    assert all(torch.equal(held[name], copies[name]) for name in held)


@ADAPTERS
@pytest.mark.parametrize("group", [2, 8])
def test_the_order_of_members_does_not_matter(family, group):
    """Case 14, with the joint batch as the truth of one order. Measured 3e-16: sums in another order."""
    policy = tiny_policy(family, torch.float64)
    responses = [token_ids(1 + 3 * i % 7, seed=i) for i in range(group)]
    advantages = [(-1.0) ** i * (1 + i) / group for i in range(group)]
    order = torch.randperm(group, generator=torch.Generator().manual_seed(0)).tolist()
    order = order if order != sorted(order) else order[::-1]
    with float64_arithmetic():
        joint = oracle.grpo_gradient(policy.model, PROMPT, responses, advantages)
        straight = gradients_of(policy, responses, advantages=advantages, block_tokens=100)
        mixed = gradients_of(
            policy, [responses[i] for i in order], advantages=[advantages[i] for i in order], block_tokens=100
        )
    assert oracle.relative_l2(mixed, straight) <= 1e-12
    assert oracle.relative_l2(straight, joint) <= 1e-12


@ADAPTERS
def test_duplicates_of_opposite_advantage_cancel(family):
    """Case 10. Relative to what one copy contributes; measured 0 to 2e-16."""
    policy = tiny_policy(family, torch.float64)
    with float64_arithmetic():
        both = gradients_of(policy, [A, A], rewards=[1.0, 0.0])
        one = gradients_of(policy, [A], advantages=[math.sqrt(0.5)])
    worst = max(float(both[name].abs().max()) / max(1e-3, float(one[name].abs().max())) for name in one)
    assert worst <= 1e-12
    assert max(float(gradient.abs().max()) for gradient in one.values()) > 1e-3


def test_both_copies_of_a_duplicate_count():
    policy = tiny_policy("llama", torch.float64)
    with float64_arithmetic():
        report = step(policy, [A, A, B], advantages=[1.0, 1.0, 0.0])
        twice = oracle.take_gradients(policy.model)
        once = gradients_of(policy, [A], advantages=[2.0 / 3.0])
    assert report.counters["responses_replayed"] == 3
    assert oracle.relative_l2(twice, once) <= 1e-12


# ---------------------------------------------------------------- nothing to learn (case 1)


@ADAPTERS
def test_equal_rewards_leave_exactly_no_gradient(family):
    policy = tiny_policy(family)
    report = step(policy, rewards=[1.0, 1.0, 1.0])
    gradients = oracle.take_gradients(policy.model)
    assert report.loss == 0.0
    assert not any(gradient.any() for gradient in gradients.values())  # NaN would be "any" as well
    assert report.metrics["grad_norm"] == 0.0
    assert "all 3 valid rewards of group 0 are equal: nothing to learn from it" in report.metrics["notes"]
    assert not step(policy, rewards=[1.0, 0.0, 1.0]).metrics["notes"]


def test_equal_rewards_keep_the_kl_gradient_unless_such_groups_are_dropped():
    policy = lora_policy("llama", trained=True)
    options = {"rewards": [1.0, 1.0, 1.0]}
    kept = gradients_of(policy, objective=ObjectiveConfig(beta=0.1), **options)
    assert max(float(gradient.abs().max()) for gradient in kept.values()) > 1e-6
    report = step(policy, objective=ObjectiveConfig(beta=0.1, drop_zero_variance_groups=True), **options)
    dropped = oracle.take_gradients(policy.model)
    assert not any(gradient.any() for gradient in dropped.values())
    assert report.counters["responses_replayed"] == 0
    assert report.loss == 0.0
    assert report.metrics["num_dropped_members"] == 3
    mixed = ObjectiveConfig(beta=0.1, drop_zero_variance_groups=True)
    assert same(
        gradients_of(policy, rewards=[1.0, 0.0, 1.0], objective=mixed),
        gradients_of(policy, rewards=[1.0, 0.0, 1.0], objective=ObjectiveConfig(beta=0.1)),
    )


def test_members_without_a_reward_have_no_advantage_but_count():
    """Case 3: [None, 1, 0] has advantages [0, .7071, -.7071]; the loss still divides by three."""
    policy = tiny_policy("llama", torch.float64)
    with float64_arithmetic():
        for missing in (None, math.nan):
            found = gradients_of(policy, rewards=[missing, 1.0, 0.0])
            expected = gradients_of(policy, advantages=[0.0, math.sqrt(0.5), -math.sqrt(0.5)])
            assert oracle.relative_l2(found, expected) <= 1e-7  # advantages are float32
    report = step(policy, rewards=[None, 1.0, 0.0])
    assert report.metrics["num_excluded_members"] == 1
    assert report.metrics["reward_mean"] == 0.5


# ---------------------------------------------------------------- old log-probs


def test_old_log_probs_enter_the_ratio():
    """The loss worked out from scores: -1/3 sum_i 1/R_i sum_t min(r A, clip(r, .8, 1.2) A)."""
    policy = tiny_policy("llama", torch.float64)
    advantages, draw = [1.0, -0.5, 0.7], torch.Generator().manual_seed(0)
    with float64_arithmetic():
        new = score_responses(policy, capture_prompt(policy, PROMPT, chunk_tokens=8), [A, B, C], block_tokens=3)
        old = [scores + 0.3 * torch.randn(len(scores), generator=draw, dtype=torch.float64) for scores in new]
        report = step(policy, old_logprobs=old, advantages=advantages)
        listed = step(policy, old_logprobs=[values.tolist() for values in old], advantages=advantages)
    expected, ratios = 0.0, []
    for scores, before, advantage in zip(new, old, advantages, strict=True):
        ratio = (scores - before).exp()
        ratios += ratio.tolist()
        expected -= float(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()) / 3
    assert abs(report.loss - expected) <= 1e-12
    assert listed.loss == pytest.approx(report.loss, abs=1e-6)  # lists of Python numbers become float32
    assert report.metrics["ratio_max"] == pytest.approx(max(ratios), abs=1e-12)
    assert report.metrics["ratio_min"] == pytest.approx(min(ratios), abs=1e-12)
    clipped = report.metrics["clip_fraction_low"], report.metrics["clip_fraction_high"]
    assert min(clipped) > 0.0
    assert all(torch.equal(a, b) for a, b in zip(report.logprobs, new, strict=True))


@ADAPTERS
def test_the_first_step_in_bfloat16_has_ratio_one(family):
    """Case 15, and the KL of a fresh adapter (case 16): exactly 0 in bfloat16 as well."""
    policy = lora_policy(family, dtype=torch.bfloat16)
    report = step(policy, objective=ObjectiveConfig(beta=0.1))
    metrics, gradients = report.metrics, oracle.take_gradients(policy.model)
    assert metrics["ratio_mean"] == metrics["ratio_max"] == metrics["ratio_min"] == 1.0
    assert metrics["abs_log_ratio_mean"] == metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0.0
    assert metrics["kl_mean"] == 0.0
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert 0.0 < metrics["grad_norm"] < math.inf


# ---------------------------------------------------------------- the optimizer


def test_one_optimizer_call_with_everything_accumulated():
    policy = tiny_policy("llama")
    one, two = gradients_of(policy), gradients_of(policy, [B, C])
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    step(policy)
    report = step(policy, [B, C], optimizer=sgd(policy, lr=0.5))
    assert report.weight_version == policy.weight_version == 1
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name] - 0.5 * (two[name] + one[name]))


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_clipping_bounds_the_norm_that_the_optimizer_sees(share):
    policy = tiny_policy("llama", torch.float64)
    with float64_arithmetic():
        plain = gradients_of(policy)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in plain.values()))
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        report = step(policy, optimizer=sgd(policy, lr=1.0), objective=ObjectiveConfig(max_grad_norm=share * norm))
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-12)  # before clipping
    moved = {name: before[name] - p.detach() for name, p in policy.model.named_parameters()}
    expected = {name: gradient * min(1.0, share) for name, gradient in plain.items()}
    assert oracle.relative_l2(moved, expected) <= 1e-5  # torch divides by norm + 1e-6


def test_a_step_improves_what_it_was_asked_to():
    """Not a claim about learning: the sign of the whole chain."""
    policy = tiny_policy("qwen3_next")
    first = step(policy, [A, B], advantages=[1.0, -1.0], optimizer=sgd(policy, lr=0.02))
    second = step(policy, [A, B], advantages=[1.0, -1.0])
    assert second.logprobs[0].mean() > first.logprobs[0].mean()
    assert second.logprobs[1].mean() < first.logprobs[1].mean()


# ---------------------------------------------------------------- scopes and states


@ADAPTERS
def test_scopes_that_name_the_same_chunks_are_the_same_bits(family):
    policy = tiny_policy(family)
    full, only = gradients_of(policy), gradients_of(policy, gradient_scope="response_only")
    assert same(gradients_of(policy, gradient_scope=Tail(3)), full)
    assert same(gradients_of(policy, gradient_scope=Tail(99)), full)
    assert same(gradients_of(policy, gradient_scope=Sampled(1.0)), full)
    assert same(gradients_of(policy, gradient_scope=Tail(0)), only)
    assert oracle.relative_l2(only, full) > 1e-2
    assert not same(gradients_of(policy, gradient_scope=Tail(1)), gradients_of(policy, gradient_scope=Tail(2)))


def test_a_given_state_is_the_captured_one():
    policy = tiny_policy("gemma3")
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    for scope in ("full", "response_only"):
        own = gradients_of(policy, gradient_scope=scope)
        assert same(gradients_of(policy, gradient_scope=scope, state=state), own)
    assert step(policy, state=state).counters["prompt_chunks_captured"] == 0
    lean = capture_prompt(policy, PROMPT, chunk_tokens=8, keep_boundaries=False)
    policy.model.zero_grad()
    assert same(gradients_of(policy, gradient_scope="response_only", state=lean), own)


def test_a_stale_state_is_used_only_by_response_only_and_only_if_asked():
    policy = tiny_policy("llama")
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    step(policy, optimizer=sgd(policy, lr=0.5))
    fresh = step(policy, gradient_scope="response_only")
    stale = step(policy, gradient_scope="response_only", state=state, allow_stale=True)
    assert not torch.equal(fresh.logprobs[0], stale.logprobs[0])
    for options in ({"gradient_scope": "response_only"}, {"allow_stale": True}):
        with pytest.raises(StaleStateError):
            step(policy, state=state, **options)


# ---------------------------------------------------------------- the report


def test_what_a_report_says():
    policy = tiny_policy("qwen3_next")
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    responses = [Response(A, torch.zeros(7), finished=True), Response(B, torch.zeros(4), finished=False)]
    report = step(policy, responses, rewards=[1.0, 0.0], measure_memory=True)
    counters = report.counters
    assert counters["prompt_chunks_captured"] == counters["prompt_chunks_walked"] == 3
    assert counters["prompt_chunk_starts_walked"] == (16, 8, 0)
    assert counters["responses_replayed"] == 2
    assert counters["response_blocks_replayed"] == 3 + 2
    assert counters["most_graphs_alive"] == 1
    assert counters["gradient_page_tensors"] == 2 * (3 + 2 + 1)  # keys and values: chunks, earlier blocks
    # Mixtures are layers 1 and 3, and layer 3 stops early in the prompt; 2 + 1 blocks run again in the reverse sweep.
    assert counters["choices_verified"] == 3 * 1 + (2 + 1) * 2
    assert report.gradient_scope == "full"
    assert report.level == 1
    assert set(report.seconds) == {"capture", "replay", "prompt_gradient", "optimizer"}
    assert all(seconds >= 0.0 for seconds in report.seconds.values())
    assert report.metrics["num_truncated_members"] == 1
    assert report.metrics["num_tokens"] == 11
    assert report.metrics["reward_mean"] == 0.5
    assert 0.0 < report.metrics["entropy_mean"] < math.log(101)
    assert report.memory["rows"] >= sum(state.inventory()[kind] for kind in ("keys", "values"))
    ledgers = {"weights", "rows", "carry", "gradient_pages", "graph", "logits"}
    assert all(report.memory[name] > 0 for name in ledgers)
    assert set(report.memory["stage_peak_bytes"]) == set(report.seconds)
    assert max(report.memory["stage_peak_bytes"].values()) == report.memory["peak_bytes"]
    assert step(policy).memory == {"source": "not measured"}
    assert "num_truncated_members" not in step(policy).metrics


def test_a_step_keeps_nothing_but_its_gradients():
    """Live tensor bytes at its end, above its start, are those of the gradients and of the report's log-probs."""
    policy = tiny_policy("qwen3_5")
    for _ in range(2):
        report = step(policy, measure_memory=True)
        gradients = sum(parameter.grad.nbytes for _, parameter in policy.trainable_parameters())
        logprobs = sum(values.nbytes for values in report.logprobs)
        assert 0 <= report.memory["live_bytes_at_end"] - gradients - logprobs <= 64  # numbers such as the norm
        policy.model.zero_grad()
