"""Log-probabilities a few rows at a time: against log_softmax over everything at once under plain autograd.

float64: measured at most 6e-16 of the largest value (the same operations, in blocks; the sums over blocks differ in
order); 1e-13 is far below any wrong formula, as `test_the_comparison_can_fail` shows.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from workbench.memory import MemoryMeter
from workbench.ops.logprobs import ROWS_AT_ONCE, backward_logprobs, token_logprobs

FLOAT64 = 1e-13
HIDDEN, VOCAB = 12, 37
ROWS = [0, 1, 63, 64, 65, 130]


class Case:
    """A head and one problem for it."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.float64, vocab: int = VOCAB, bias: bool = True) -> None:
        draw = torch.Generator().manual_seed(rows)
        self.head = nn.Linear(HIDDEN, vocab, bias=bias, dtype=dtype)
        for parameter in self.head.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(dtype)
        self.hidden = torch.randn(rows, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
        self.targets = torch.randint(0, vocab, (rows,), generator=draw)
        self.coefficients = torch.randn(rows, generator=draw, dtype=torch.float64)

    def truth(self, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Log-probs, entropies, and the gradient of sum(coefficients * log-probs): one pass, plain autograd."""
        hidden = self.hidden.clone().requires_grad_()
        logprobs = torch.log_softmax(self.head(hidden) / temperature, dim=-1)
        picked = logprobs.gather(-1, self.targets[:, None])[:, 0]
        wrt = [hidden, *self.head.parameters()]
        gradients = torch.autograd.grad((self.coefficients * picked).sum(), wrt)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1).detach()
        return picked.detach(), entropy, dict(zip(["hidden", "weight", "bias"], gradients, strict=False))


def error(found: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest true value; against zeros it is absolute, of nothing it is 0."""
    assert found.shape == truth.shape
    if not truth.numel():
        return 0.0
    return float((found.double() - truth.double()).abs().max()) / (float(truth.abs().max()) or 1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("rows", ROWS)
def test_logprobs_entropies_and_gradients(rows, temperature):
    case = Case(rows)
    logprobs, entropies, gradients = case.truth(temperature)
    found = token_logprobs(case.head, case.hidden, case.targets, temperature=temperature)
    assert [tensor.dtype for tensor in found] == [torch.float64] * 2
    assert error(found[0], logprobs) <= FLOAT64
    assert error(found[1], entropies) <= FLOAT64

    by_hidden = backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=temperature)
    assert error(by_hidden, gradients["hidden"]) <= FLOAT64
    for name, parameter in case.head.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert error(gradient, gradients[name]) <= FLOAT64
        assert (gradient.abs().max() > 0) == (rows > 0)


def test_the_comparison_can_fail():
    """Each of these is a mistake one could make; none of them hides in the bound."""
    case = Case(65)
    logprobs, entropies, gradients = case.truth(0.6)
    unscaled = token_logprobs(case.head, case.hidden, case.targets, temperature=1.0)
    assert error(unscaled[0], logprobs) > 0.1
    assert error(unscaled[1], entropies) > 0.1
    shifted = case.targets.roll(1)
    assert error(token_logprobs(case.head, case.hidden, shifted, temperature=0.6)[0], logprobs) > 0.1
    wrong = backward_logprobs(case.head, case.hidden, case.targets, case.coefficients * 1.001, temperature=0.6)
    assert error(wrong, gradients["hidden"]) > 1e-4


def test_gradients_add_to_what_is_there_and_reach_only_what_is_trainable():
    case = Case(65)
    case.head.bias.requires_grad_(False)
    case.head.weight.grad = torch.ones_like(case.head.weight)
    backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=1.0)
    case.head.bias.requires_grad_(True)
    assert error(case.head.weight.grad - 1.0, case.truth(1.0)[2]["weight"]) <= FLOAT64
    assert case.head.bias.grad is None
    frozen = Case(65)
    frozen.head.requires_grad_(False)
    gradient = backward_logprobs(frozen.head, frozen.hidden, frozen.targets, frozen.coefficients, temperature=1.0)
    frozen.head.requires_grad_(True)
    assert error(gradient, frozen.truth(1.0)[2]["hidden"]) <= FLOAT64


def test_minus_infinity_on_tokens_that_were_not_sampled():
    """Case 21: a head that forbids tokens. The same as if those columns did not exist, nothing becomes NaN."""
    case = Case(65, bias=False)
    forbidden = torch.tensor([0, 7, VOCAB - 1])
    kept = torch.tensor([i for i in range(VOCAB) if i not in forbidden])
    case.targets = kept[case.targets % len(kept)]

    def head(hidden: Tensor) -> Tensor:
        return case.head(hidden).index_fill(-1, forbidden, -math.inf)

    found = token_logprobs(head, case.hidden, case.targets, temperature=0.6)
    gradient = backward_logprobs(head, case.hidden, case.targets, case.coefficients, temperature=0.6)
    weight_gradient = case.head.weight.grad.clone()

    smaller = Case(65, bias=False)
    smaller.head.weight.data = case.head.weight.data[kept]
    smaller.targets = torch.searchsorted(kept, case.targets)
    logprobs, entropies, gradients = smaller.truth(0.6)
    assert error(found[0], logprobs) <= FLOAT64
    assert error(found[1], entropies) <= FLOAT64
    assert error(gradient, gradients["hidden"]) <= FLOAT64
    assert error(weight_gradient[kept], gradients["weight"]) <= FLOAT64
    assert not weight_gradient[forbidden].any()


def test_a_sampled_token_of_probability_zero_says_so():
    case = Case(3)

    def head(hidden: Tensor) -> Tensor:
        return case.head(hidden).index_fill(-1, case.targets[1:2], -math.inf)

    logprobs, _ = token_logprobs(head, case.hidden, case.targets, temperature=1.0)
    assert logprobs[1] == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_float32(dtype):
    """The head gives bfloat16 logits; from there on only float32 rounding is added."""
    case = Case(65, dtype)
    logprobs, entropies = token_logprobs(case.head, case.hidden, case.targets, temperature=0.6)
    assert logprobs.dtype == entropies.dtype == torch.float32
    exact = torch.log_softmax(case.head(case.hidden).detach().double() / 0.6, dim=-1)
    truth = exact.gather(-1, case.targets[:, None])[:, 0]
    # Measured 1.4e-7, which is float32 rounding; a bfloat16 log-softmax would be off by 2e-3.
    assert error(logprobs, truth) <= 1e-6
    assert error(entropies, -(exact.exp() * exact).sum(-1)) <= 1e-6
    gradient = backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=0.6)
    assert gradient.dtype == dtype


# ---------------------------------------------------------------- memory


def logits_peak(rows: int, vocab: int, *, backward: bool) -> int:
    case = Case(rows, torch.float32, vocab)
    case.head.requires_grad_(False)
    with MemoryMeter() as meter, meter.ledger("logits"):
        if backward:
            backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=0.6)
        else:
            token_logprobs(case.head, case.hidden, case.targets, temperature=0.6)
    return meter.report()["logits"]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_no_tensor_of_rows_by_vocabulary(backward):
    """More rows cost their results and nothing of the size of the vocabulary: exact bytes of an exact meter."""
    vocab, results = 5003, HIDDEN if backward else 4  # [n, hidden], or log-probs and entropies, in pieces and joined
    block, many = (logits_peak(n * ROWS_AT_ONCE, vocab, backward=backward) for n in (1, 16))
    assert 0 <= many - block <= 15 * ROWS_AT_ONCE * results * 4
    assert 2 * ROWS_AT_ONCE * vocab * 4 < block < 3.1 * ROWS_AT_ONCE * vocab * 4  # logits, scaled, log-softmax
    half = logits_peak(ROWS_AT_ONCE // 2, vocab, backward=backward)
    assert half < 0.6 * block  # the meter sees the logits: fewer rows than a block, fewer bytes


def test_nothing_outlives_a_call():
    case = Case(130, torch.float32)
    with MemoryMeter() as meter:
        live = []
        for _ in range(4):
            token_logprobs(case.head, case.hidden, case.targets, temperature=1.0)
            backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=1.0)
            live.append(meter.report()["live_bytes_at_end"])
    own_gradients = sum(p.nbytes for p in case.head.parameters())
    assert live == [own_gradients] * 4
