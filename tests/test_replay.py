"""Scoring and replay of responses from the boundary.

Scores against the stock model's full forward: float32 measured at most 4.3e-6 (bound 1e-5, the issue's), float64 6e-15
(bound 1e-12). Everything about repetition is bitwise.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.helpers import float64_arithmetic, lora_policy, tiny_policy, token_ids
from workbench import InvalidInputError, Policy, Response, capture_prompt, score_responses, update_step
from workbench.memory import MemoryMeter
from workbench.model_sources import TINY_FAMILIES
from workbench.step import GraphCensus

FLOAT32, FLOAT64 = 1e-5, 1e-12
FAMILIES = pytest.mark.parametrize("family", TINY_FAMILIES)
PROMPT = token_ids(22)
A, B = token_ids(7, seed=1), token_ids(4, seed=2)


def worst(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, truth, strict=True) if len(b))


# ---------------------------------------------------------------- scores


@FAMILIES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32), (torch.float64, FLOAT64)], ids=["fp32", "fp64"])
def test_scores_are_those_of_a_full_forward(family, dtype, bound):
    """Case 11 with the response of one token: log_softmax of the last prompt token's logits."""
    policy, responses = tiny_policy(family, dtype), [A, B, A[:1]]
    context = float64_arithmetic() if dtype == torch.float64 else oracle.deterministic_index()
    with context, torch.no_grad():
        state = capture_prompt(policy, PROMPT, chunk_tokens=8)
        scores = score_responses(policy, state, responses, block_tokens=3)
        truth = [oracle.sequence_logprobs(policy.model, PROMPT, response) for response in responses]
        last = policy.model(input_ids=PROMPT[None], use_cache=False).logits[0, -1]
    assert all(score.dtype == dtype and not score.requires_grad for score in scores)
    assert worst(scores, truth) <= bound
    assert worst(scores[2:], [torch.log_softmax(last, -1)[A[:1]]]) <= bound
    assert worst(truth[:1], [truth[0].roll(1)]) > 0.1  # a score at the wrong place would be seen


def test_temperature_divides_the_logits():
    policy = tiny_policy("qwen3", torch.float64)
    with float64_arithmetic(), torch.no_grad():
        state = capture_prompt(policy, PROMPT)
        for temperature in (0.6, 2.0):
            scores = score_responses(policy, state, [A], temperature=temperature)
            assert worst(scores, [oracle.sequence_logprobs(policy.model, PROMPT, A, temperature)]) <= FLOAT64
            assert worst(scores, score_responses(policy, state, [A])) > 0.1


@FAMILIES
def test_scores_do_not_depend_on_the_block_size(family):
    policy = tiny_policy(family, torch.float64)
    with float64_arithmetic():
        state = capture_prompt(policy, PROMPT, chunk_tokens=8)
        whole = score_responses(policy, state, [A])
        for size in (1, 2, 3, 6, 7, 8):
            assert worst(score_responses(policy, state, [A], block_tokens=size), whole) <= FLOAT64


def test_every_form_of_a_response_scores_the_same():
    policy = tiny_policy("llama")
    state = capture_prompt(policy, PROMPT)
    forms = [A, A.tolist(), A.to(torch.int32), A.numpy(), Response(A, torch.zeros(7), finished=True)]
    scores = score_responses(policy, state, forms)
    assert all(torch.equal(score, scores[0]) for score in scores)


def test_empty_responses_have_empty_scores():
    policy = tiny_policy("qwen3_5", torch.float64)
    with float64_arithmetic():
        scores = score_responses(policy, capture_prompt(policy, PROMPT), [[], A, torch.zeros(0, dtype=torch.int64)])
    assert [len(score) for score in scores] == [0, 7, 0]
    assert {score.dtype for score in scores} == {torch.float64}


def test_scoring_keeps_nothing():
    policy = tiny_policy("qwen3_5")
    state = capture_prompt(policy, PROMPT)
    with MemoryMeter() as meter:
        live = []
        for _ in range(3):
            score_responses(policy, state, [A, B], block_tokens=3)
            live.append(meter.report()["live_bytes_at_end"])
    assert live == [0, 0, 0]


# ---------------------------------------------------------------- replay repeats scoring, bit by bit


def step(policy: Policy, responses: list[Tensor], **options: Any) -> Any:
    """One step in chunks of 8 (the prompt has three) and blocks of 3; gradients stay in .grad."""
    settings = {"advantages": [1.0, -0.5, 0.7][: len(responses)], "chunk_tokens": 8, "block_tokens": 3}
    return update_step(policy, PROMPT, responses, measure_memory=False, **settings | options)


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_replay_computes_what_scoring_computed(family, dtype):
    """Case 15: with old log-probs from `score_responses` the first step's ratios are exactly 1, nothing is clipped."""
    policy = tiny_policy(family, dtype)
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    scores = score_responses(policy, state, [A, B, A[:1]], block_tokens=3)
    assert all(score.dtype == torch.float32 for score in scores)
    for options in ({"state": state}, {"state": state, "gradient_scope": "response_only", "checkpoint_layers": True}):
        report = step(policy, [A, B, A[:1]], old_logprobs=scores, **options)
        assert all(torch.equal(a, b) for a, b in zip(report.logprobs, scores, strict=True))
        metrics = report.metrics
        assert metrics["ratio_max"] == metrics["ratio_min"] == metrics["ratio_mean"] == 1.0
        assert metrics["abs_log_ratio_mean"] == metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0.0
    assert report.metrics["grad_norm"] > 0.0


@FAMILIES
def test_a_then_b_then_a_again(family):
    """Case 13: the second A is bitwise the first, in loss, log-probs and gradient; the state was only read."""
    policy = tiny_policy(family)
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    checksum = state.checksum()
    results = []
    for response in (A, B, A):
        report = step(policy, [response], state=state)
        results.append((report.loss, report.logprobs[0], oracle.take_gradients(policy.model)))
    first, other, second = results
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert first[2].keys() == second[2].keys()
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])
    assert not all(torch.equal(first[2][name], other[2][name]) for name in first[2])
    assert state.checksum() == checksum


# ---------------------------------------------------------------- one graph alive (cases 13, 14)


class GraphWatch:
    """Weak references to every tensor with a graph that the model's layers hand out, checked at each new segment."""

    def __init__(self, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive_before: list[int] = []
        self._tensors: list[weakref.ref[Tensor]] = []
        forward, run_layer = policy.adapter.forward_chunk, policy.adapter.run_layer

        def watched_forward(*args: Any, **kwargs: Any) -> Any:
            self.alive_before.append(self.num_alive())
            return forward(*args, **kwargs)

        def watched_layer(index: int, hidden: Tensor, run: Any, **kwargs: Any) -> Tensor | None:
            out = run_layer(index, hidden, run, **kwargs)
            left = run.layers[index]
            for tensor in [out, *left.rows.values(), *left.carry.values()]:
                if tensor is not None and tensor.requires_grad:
                    self._tensors.append(weakref.ref(tensor))
            return out

        monkeypatch.setattr(policy.adapter, "forward_chunk", watched_forward)
        monkeypatch.setattr(policy.adapter, "run_layer", watched_layer)

    @property
    def num_seen(self) -> int:
        return len(self._tensors)

    def num_alive(self) -> int:
        return sum(ref() is not None for ref in self._tensors)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "glm_moe_dsa"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["whole graph", "layer by layer"])
def test_when_a_segment_begins_no_earlier_graph_is_alive(family, checkpoint, monkeypatch):
    """Three members of 20, 4 and 1 tokens in blocks of 3, prompt chunks of 8: 10 + 3 graphs, one after the other."""
    policy = tiny_policy(family)
    watch = GraphWatch(policy, monkeypatch)
    gc.disable()  # references must die by themselves, not by the collector
    try:
        report = step(policy, [token_ids(20, seed=3), B, A[:1]], checkpoint_layers=checkpoint)
    finally:
        gc.enable()
    assert watch.num_seen > 13
    assert set(watch.alive_before) == {0}
    assert watch.num_alive() == 0
    assert report.counters["most_graphs_alive"] == 1
    assert report.counters["response_blocks_replayed"] == 7 + 2 + 1
    assert report.counters["prompt_chunk_starts_walked"] == (16, 8, 0)
    # Forward passes: capture 5; each block once, and again in the reverse sweep, but for the last; each chunk once.
    assert len(watch.alive_before) == 3 + (7 + 6) + (2 + 1) + 1 + 3


def test_the_watch_and_the_census_can_fail(monkeypatch):
    policy, hoard = tiny_policy("llama"), []
    watch = GraphWatch(policy, monkeypatch)
    forward = policy.adapter.forward_chunk
    monkeypatch.setattr(policy.adapter, "forward_chunk", lambda *a, **k: hoard.append(forward(*a, **k)) or hoard[-1])
    report = step(policy, [A])
    assert max(watch.alive_before) > 0
    assert report.counters["most_graphs_alive"] > 1
    census, tensors = GraphCensus(), [torch.ones(1), torch.ones(1)]
    for tensor in tensors:
        census.register(tensor)
    assert census.most_alive == 2


# ---------------------------------------------------------------- lengths (case 5)


@FAMILIES
def test_an_empty_member_adds_nothing_but_counts(family):
    """Token mean over the others; "grpo" divides by all members."""
    policy = tiny_policy(family)
    alone = step(policy, [A], advantages=[1.0]), oracle.take_gradients(policy.model)
    joint = step(policy, [torch.zeros(0, dtype=torch.int64), A], advantages=[5.0, 1.0])
    gradients = oracle.take_gradients(policy.model)
    assert joint.loss == alone[0].loss / 2
    assert oracle.relative_l2({n: 2 * g for n, g in gradients.items()}, alone[1]) <= 1e-6  # exact but for rounding
    assert [len(logprobs) for logprobs in joint.logprobs] == [0, 7]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_group_of_empty_members_has_no_gradient(family):
    policy = tiny_policy(family)
    report = step(policy, [[], []], advantages=[1.0, -1.0])
    assert report.loss == 0.0
    assert not any(g.any() for g in oracle.take_gradients(policy.model).values())
    numbers = [value for value in report.metrics.values() if isinstance(value, int | float)]
    assert all(torch.isfinite(torch.tensor(float(value))) for value in numbers)


def test_a_lora_policy_replays_what_it_scores():
    policy = lora_policy("qwen3_5", trained=True)
    base = score_responses(policy.reference, capture_prompt(policy.reference, PROMPT), [A])
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    scores = score_responses(policy, state, [A], block_tokens=3)
    assert torch.equal(step(policy, [A], state=state).logprobs[0], scores[0])
    assert worst(scores, base) > 1e-3  # the adapter matters


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([], "responses is empty"),
        (torch.tensor([[5, 6]]), "must be a list of responses"),
        (Response(A, torch.zeros(7), finished=True), "must be a list of responses"),
        ({1: [5]}, "must be a list of responses"),
        ("text", "not a sequence of token ids"),
        ([[5], [101]], "response 1: id 101 at position 0 is outside the vocabulary of 101"),
        ([[5], [6, -1]], "response 1: id -1 at position 1"),
        ([[5], [6.0]], "response 1 has dtype torch.float32"),
        ([[[5]]], r"response 0 has shape \\(1, 1\\)"),
        ([5, 6], r"response 0 has shape \\(\\)"),
        ([None], "response 0 is not a sequence of token ids"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_responses(responses, message):
    policy = tiny_policy("llama")
    with pytest.raises(InvalidInputError, match=message.replace("\\\\", "\\")):
        score_responses(policy, capture_prompt(policy, PROMPT), responses)


@pytest.mark.parametrize("options", [{"block_tokens": 0}, {"block_tokens": True}, {"block_tokens": 2.0}], ids=str)
def test_bad_block_sizes(options):
    policy = tiny_policy("llama")
    with pytest.raises(InvalidInputError, match="block_tokens="):
        score_responses(policy, capture_prompt(policy, PROMPT), [A], **options)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_temperatures(temperature):
    policy = tiny_policy("llama")
    with pytest.raises(InvalidInputError, match="temperature="):
        score_responses(policy, capture_prompt(policy, PROMPT), [A], temperature=temperature)


def test_a_response_beyond_the_models_positions_is_named():
    policy = tiny_policy("llama", max_position_embeddings=25)
    state = capture_prompt(policy, PROMPT)
    score_responses(policy, state, [A[:3]])
    with pytest.raises(InvalidInputError, match=r"the prompt with response 1 has 26 positions.*of 25.*max_positions=N"):
        score_responses(policy, state, [A[:3], A[:4]])
