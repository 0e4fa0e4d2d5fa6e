"""Log-probabilities a few rows at a time: against log_softmax over everything at once under plain autograd.

float64: measured at most 6e-16 of the largest value (the same operations, in blocks; the sums over blocks differ in
order); 1e-13 is far below any wrong formula, as `test_the_comparison_can_fail` shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from workbench.memory import MemoryMeter
from workbench.ops.logprobs import ROWS_AT_ONCE, Head, backward_logprobs, token_kl, token_logprobs

FLOAT64 = 1e-13
HIDDEN, VOCAB = 12, 37
ROWS = [0, 1, 63, 64, 65, 130]
PLAIN = pytest.mark.parametrize("plain", [True, False], ids=["linear", "wrapped"])
Finish = Callable[[Tensor], Tensor]


class Case:
    """A head and one problem for it. plain: a bare nn.Linear, whose backward is written out, or one that is wrapped, as
    a LoRA or quantised head is, which goes through autograd."""

    def __init__(
        self,
        rows: int,
        dtype: torch.dtype = torch.float64,
        vocab: int = VOCAB,
        *,
        bias: bool = True,
        plain: bool = True,
        finish: Finish | None = None,
        columns: int | None = None,
    ) -> None:
        draw = torch.Generator().manual_seed(rows)
        self.linear = nn.Linear(HIDDEN, vocab, bias=bias, dtype=dtype)
        self.head = Head(self.linear if plain else nn.Sequential(self.linear), finish, columns)
        for parameter in self.linear.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(dtype)
        self.hidden = torch.randn(rows, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
        self.targets = torch.randint(0, columns or vocab, (rows,), generator=draw)
        self.coefficients = torch.randn(rows, generator=draw, dtype=torch.float64)

    def truth(self, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Log-probs, entropies, and the gradient of sum(coefficients * log-probs): one pass, plain autograd."""
        hidden = self.hidden.clone().requires_grad_()
        logits = self.head.finished(self.linear(hidden))
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        picked = logprobs.gather(-1, self.targets[:, None])[:, 0]
        wrt = [hidden, *self.linear.parameters()]
        gradients = torch.autograd.grad((self.coefficients * picked).sum(), wrt)
        entropy = -torch.xlogy(logprobs.exp(), logprobs.exp()).sum(dim=-1).detach()
        return picked.detach(), entropy, dict(zip(["hidden", "weight", "bias"], gradients, strict=False))


def error(found: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest true value; against zeros it is absolute, of nothing it is 0."""
    assert found.shape == truth.shape
    if not truth.numel():
        return 0.0
    return float((found.double() - truth.double()).abs().max()) / (float(truth.abs().max()) or 1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("rows", ROWS)
@PLAIN
def test_logprobs_entropies_and_gradients(rows, temperature, plain):
    case = Case(rows, plain=plain)
    logprobs, entropies, gradients = case.truth(temperature)
    found = token_logprobs(case.head, case.hidden, case.targets, temperature=temperature)
    assert [tensor.dtype for tensor in found] == [torch.float64] * 2
    assert error(found[0], logprobs) <= FLOAT64
    assert error(found[1], entropies) <= FLOAT64

    by_hidden = backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=temperature)
    assert error(by_hidden, gradients["hidden"]) <= FLOAT64
    for name, parameter in case.linear.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert error(gradient, gradients[name]) <= FLOAT64
        assert (gradient.abs().max() > 0) == (rows > 0)


@PLAIN
def test_a_soft_cap_and_columns_beyond_the_vocabulary(plain):
    """Case 21: padded columns do not exist, for the normaliser either; the cap (Gemma's) comes first."""
    case = Case(65, plain=plain, columns=30, finish=lambda logits: torch.tanh(logits / 5.0) * 5.0)
    logprobs, entropies, gradients = case.truth(0.6)
    found = token_logprobs(case.head, case.hidden, case.targets, temperature=0.6)
    assert error(found[0], logprobs) <= FLOAT64
    assert error(found[1], entropies) <= FLOAT64
    by_hidden = backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=0.6)
    assert error(by_hidden, gradients["hidden"]) <= FLOAT64
    for name, parameter in case.linear.named_parameters():
        assert error(parameter.grad, gradients[name]) <= FLOAT64
        assert not parameter.grad[30:].any()
    unpadded = Case(65)
    unpadded.targets = case.targets
    assert error(unpadded.truth(0.6)[0], logprobs) > 0.1  # cap and padding matter here


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


@PLAIN
def test_gradients_add_to_what_is_there_and_reach_only_what_is_trainable(plain):
    case = Case(65, plain=plain)
    case.linear.bias.requires_grad_(False)
    case.linear.weight.grad = torch.ones_like(case.linear.weight)
    backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=1.0)
    case.linear.bias.requires_grad_(True)
    assert error(case.linear.weight.grad - 1.0, case.truth(1.0)[2]["weight"]) <= FLOAT64
    assert case.linear.bias.grad is None
    frozen = Case(65, plain=plain)
    frozen.linear.requires_grad_(False)
    gradient = backward_logprobs(frozen.head, frozen.hidden, frozen.targets, frozen.coefficients, temperature=1.0)
    frozen.linear.requires_grad_(True)
    assert error(gradient, frozen.truth(1.0)[2]["hidden"]) <= FLOAT64


@PLAIN
def test_minus_infinity_on_tokens_that_were_not_sampled(plain):
    """Case 21: a head that forbids tokens. The same as if those columns did not exist, nothing becomes NaN."""
    forbidden = torch.tensor([0, 7, VOCAB - 1])
    kept = torch.tensor([i for i in range(VOCAB) if i not in forbidden])
    case = Case(65, bias=False, plain=plain, finish=lambda logits: logits.index_fill(-1, forbidden, -math.inf))
    case.targets = kept[case.targets % len(kept)]
    found = token_logprobs(case.head, case.hidden, case.targets, temperature=0.6)
    gradient = backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=0.6)
    weight_gradient = case.linear.weight.grad.clone()

    smaller = Case(65, bias=False)
    smaller.linear.weight.data = case.linear.weight.data[kept]
    smaller.targets = torch.searchsorted(kept, case.targets)
    logprobs, entropies, gradients = smaller.truth(0.6)
    assert error(found[0], logprobs) <= FLOAT64
    assert error(found[1], entropies) <= FLOAT64
    assert error(gradient, gradients["hidden"]) <= FLOAT64
    assert error(weight_gradient[kept], gradients["weight"]) <= FLOAT64
    assert not weight_gradient[forbidden].any()


def test_a_sampled_token_of_probability_zero_says_so():
    case = Case(3, finish=lambda logits: logits.index_fill(-1, case.targets[1:2], -math.inf))
    logprobs, _ = token_logprobs(case.head, case.hidden, case.targets, temperature=1.0)
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


def logits_peak(rows: int, vocab: int, *, plain: bool, backward: bool) -> int:
    case = Case(rows, torch.float32, vocab, plain=plain)
    case.linear.requires_grad_(False)
    with MemoryMeter() as meter, meter.ledger("logits"):
        if backward:
            backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=0.6)
        else:
            token_logprobs(case.head, case.hidden, case.targets, temperature=0.6)
    return meter.report()["logits"]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@PLAIN
def test_no_tensor_of_rows_by_vocabulary(plain, backward):
    """More rows cost their results and nothing of the size of the vocabulary: exact bytes of an exact meter."""
    vocab, results = 5003, HIDDEN if backward else 4  # [n, hidden], or log-probs and entropies, in pieces and joined
    block, many = (logits_peak(rows, vocab, plain=plain, backward=backward) for rows in (64, 1024))
    assert 0 <= many - block <= (1024 - 64) * results * 4
    tensors = 4 if backward and plain else 3  # logits, scaled or gradients, log-softmax; the linear path keeps a leaf
    assert 2 * 64 * vocab * 4 < block < (tensors + 0.1) * 64 * vocab * 4
    half = logits_peak(32, vocab, plain=plain, backward=backward)
    assert half < 0.6 * block  # the meter sees the logits: fewer rows than a block, fewer bytes


@PLAIN
def test_nothing_outlives_a_call(plain):
    case = Case(130, torch.float32, plain=plain)
    with MemoryMeter() as meter:
        live = []
        for _ in range(4):
            token_logprobs(case.head, case.hidden, case.targets, temperature=1.0)
            backward_logprobs(case.head, case.hidden, case.targets, case.coefficients, temperature=1.0)
            live.append(meter.report()["live_bytes_at_end"])
    own_gradients = sum(p.nbytes for p in case.linear.parameters())
    assert live == [own_gradients] * 4


def test_a_linear_head_never_makes_a_second_gradient_of_its_weight():
    """Its gradient is as large as the head; only the one that stays may exist, block after block."""
    linear = nn.Linear(512, 1009)
    hidden, targets = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)), torch.arange(256)
    with MemoryMeter() as meter:
        for _ in range(2):
            backward_logprobs(Head(linear), hidden, targets, torch.ones(256), temperature=1.0)
    own = sum(p.nbytes for p in linear.parameters())
    # measured 1.75 x: the gradient, 4 x the logits of 64 rows and the result; 2.57 x by autograd alone
    assert own < meter.report()["peak_bytes"] < 1.9 * own


# ---------------------------------------------------------------- the divergence of two distributions


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kl_is_that_of_whole_distributions(rows, temperature):
    case = Case(rows, columns=31, finish=lambda logits: 5 * torch.tanh(logits / 5))
    other = case.hidden + 0.3 * torch.randn(case.hidden.shape, generator=torch.Generator().manual_seed(1)).double()
    p, q = (torch.log_softmax(case.head(x) / temperature, dim=-1).detach() for x in (case.hidden, other))
    truth = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(dim=-1)
    assert error(token_kl(case.head, case.hidden, other, temperature=temperature), truth) <= FLOAT64
    same = token_kl(case.head, case.hidden, case.hidden, temperature=temperature)
    assert not same.any()
    assert same.shape == (rows,)


def test_kl_of_excluded_ids_is_zero_and_no_tensor_of_rows_by_vocabulary_exists():
    vocab, rows = 5_000, 4 * ROWS_AT_ONCE
    mask = torch.zeros(vocab)
    mask[:7] = -math.inf
    case = Case(rows, torch.float32, vocab, finish=lambda logits: logits + mask)
    with MemoryMeter("cpu") as meter:
        kl = token_kl(case.head, case.hidden, case.hidden + 0.1, temperature=1.0)
    assert bool(torch.isfinite(kl).all())
    assert bool((kl > 0).all())
    # A block's tensors: logits and log-softmax of either side, probabilities and terms.
    assert meter.report()["peak_bytes"] < 8 * ROWS_AT_ONCE * vocab * 4 < 2.1 * rows * vocab * 4
