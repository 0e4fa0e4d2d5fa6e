"""Pages, gradient pages and the resident state: exact sizes, honest inventories, and refusal of what is not current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.helpers import lora_policy, tiny_policy, token_ids
from workbench import (
    InvalidInputError,
    Policy,
    ResidentState,
    Sampled,
    StaleStateError,
    Tail,
    capture_prompt,
    sample_responses,
    score_responses,
    update_step,
)
from workbench.memory import MemoryMeter
from workbench.model_sources import TINY_FAMILIES
from workbench.state.pages import GradientPages, Page, exact_copy, last_rows, total_nbytes

PROMPT = token_ids(30)


def page_of(rows: Tensor, start: int = 0, stop: int | None = None) -> Page:
    return Page(start, start + rows.shape[-2] if stop is None else stop, ({"keys": rows}, {}))


# ---------------------------------------------------------------- pieces


def test_exact_copies_own_no_more_than_their_elements():
    base = torch.arange(24.0, requires_grad=True)
    views = {"part": base[3:5], "transposed": base.view(4, 6).t(), "expanded": base[:1].expand(3)}
    for name, copy in exact_copy(views).items():
        assert torch.equal(copy, views[name])
        assert copy.untyped_storage().nbytes() == copy.numel() * copy.element_size()
        assert copy.is_contiguous()
        assert not copy.requires_grad
        assert copy.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (1, 1), (5, 5), (6, 6), (7, 6)])
def test_last_rows(count, kept):
    rows = {"keys": torch.randn(1, 2, 6, 4), "values": torch.randn(1, 2, 6, 4)}
    for name, last in last_rows(rows, count).items():
        assert torch.equal(last, rows[name][:, :, 6 - kept :])


def test_rows_of_a_page_end_where_the_page_ends():
    rows = torch.randn(1, 2, 5, 4)
    assert page_of(rows, start=10).rows_start(0) == 10
    assert page_of(rows, start=10, stop=22).rows_start(0) == 17
    assert page_of(rows, start=10).rows_start(1) == 15  # a layer without rows: nothing before the end
    assert total_nbytes(page_of(rows).tensors()) == rows.nbytes


# ---------------------------------------------------------------- gradient pages


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_gradients_accumulate_in_float32_or_better(dtype, kept):
    """256 + 1 + 1 + ... stays 256 in bfloat16."""
    page, pages = page_of(torch.zeros(1, 1, 2, 3, dtype=dtype)), GradientPages(lambda start: True)
    pages.add(page, 0, "keys", torch.full((1, 1, 2, 3), 256.0, dtype=dtype))
    for _ in range(5):
        pages.add(page, 0, "keys", torch.ones(1, 1, 2, 3, dtype=dtype))
    (gradient,) = pages.take(0).values()
    assert gradient.dtype == kept
    assert torch.equal(gradient, torch.full_like(gradient, 261.0))


def test_what_is_added_is_neither_kept_nor_written_to():
    page, pages = page_of(torch.zeros(1, 2, 3, 4)), GradientPages(lambda start: True)
    first = torch.ones(1, 2, 4, 3).transpose(-1, -2)
    pages.add(page, 0, "keys", first)
    pages.add(page, 0, "keys", first)
    assert torch.equal(first, torch.ones_like(first))
    (gradient,) = pages.take(0).values()
    assert torch.equal(gradient, torch.full_like(gradient, 2.0))
    assert gradient.is_contiguous()


def test_pages_are_allocated_when_touched_and_taken_once():
    allocations: list[int] = []

    @contextmanager
    def allocating() -> Iterator[None]:
        allocations.append(1)
        yield

    pages = GradientPages(lambda start: start != 3, allocating)
    near, far = page_of(torch.zeros(1, 1, 3, 4)), page_of(torch.zeros(1, 1, 3, 4), start=3)
    assert pages.wants(near)
    assert not pages.wants(far)
    assert pages.take(0) == {}
    pages.add(near, 0, "keys", torch.ones(1, 1, 3, 4))
    pages.add(near, 0, "keys", torch.ones(1, 1, 3, 4))
    pages.add(near, 1, "values", torch.ones(1, 1, 3, 4))
    assert len(allocations) == pages.num_allocated == 2
    assert set(pages.take(0)) == {(0, "keys"), (1, "values")}
    assert pages.take(0) == {}


@pytest.mark.parametrize("before", [True, False], ids=["on top", "first"])
def test_scattered_rows_repeat_and_add(before):
    rows = torch.zeros(1, 1, 5, 2)
    page, pages = page_of(rows), GradientPages(lambda start: True)
    expected = torch.zeros(1, 1, 5, 2)
    if before:
        pages.add(page, 0, "keys", torch.ones_like(rows))
        expected += 1.0
    index, gradient = torch.tensor([4, 0, 4, 4]), torch.arange(8.0).view(4, 2)
    pages.add_rows(page, 0, "keys", index, gradient)
    pages.add_rows(page, 0, "keys", index[:1], gradient[:1])
    for row, value in zip([4, 0, 4, 4, 4], [*gradient, gradient[0]], strict=True):
        expected[0, 0, row] += value
    (found,) = pages.take(0).values()
    assert torch.equal(found, expected)
    assert pages.num_allocated == 1


# ---------------------------------------------------------------- inventory


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("boundaries", [True, False])
def test_every_resident_byte_is_needed_and_counted(family, boundaries):
    """No view keeps a larger tensor alive, nothing is shared, and the sums agree: by kind, in all, and by the meter."""
    policy = tiny_policy(family)
    with MemoryMeter() as meter:
        state = capture_prompt(policy, PROMPT, chunk_tokens=8, keep_boundaries=boundaries)
        live = meter.report()["live_bytes_at_end"]
    tensors = [*state.row_tensors(), *state.carry_tensors()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    assert len(storages) == sum(1 for t in tensors if t.numel())
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors)
    assert sum(storages.values()) == state.nbytes == sum(state.inventory().values())
    assert all(
        kind.removeprefix("boundary_") in {"keys", "values", "latents", "index_keys", "recurrent", "conv"}
        for kind in state.inventory()
    )
    hashes = 8 * sum(len(state.choices_of(i)) for i in range(len(state.pages)))  # what sparse layers selected
    assert live == state.nbytes + state.prompt_ids.nbytes + hashes


def test_bytes_of_a_dense_model_by_hand():
    """2 layers x 2 heads x 16 wide x 29 positions, float32; no carry."""
    state = capture_prompt(tiny_policy("llama"), PROMPT, chunk_tokens=8)
    assert state.positions == 29
    assert state.inventory() == {"keys": 2 * 2 * 16 * 29 * 4, "values": 2 * 2 * 16 * 29 * 4}
    assert [(page.start, page.stop) for page in state.pages] == [(0, 8), (8, 16), (16, 24), (24, 29)]


def test_bytes_of_a_hybrid_by_hand():
    """Three gated-delta layers of 4 heads x 8 x 12 and a convolution tail of 2 x 2 x 8 + 4 x 12 channels x 3, in
    float32, at 5 chunk starts but the first; one attention layer."""
    state = capture_prompt(tiny_policy("qwen3_5"), PROMPT, chunk_tokens=8)
    recurrent, conv = 3 * 4 * 8 * 12 * 4, 3 * (2 * 2 * 8 + 4 * 12) * 3 * 4
    assert state.inventory() == {
        "keys": 2 * 16 * 29 * 4,
        "values": 2 * 16 * 29 * 4,
        "recurrent": recurrent,
        "conv": conv,
        "boundary_recurrent": 3 * recurrent,
        "boundary_conv": 3 * conv,
    }
    assert {0, 8, 16, 24, 29} == set(state._carries)


def test_bytes_of_sliding_windows_by_hand():
    """Window 12, 60 positions: with boundaries each page keeps its last 11 rows, without them only the last 11 remain,
    be they of one page (chunks of 20) or of two (chunks of 8)."""
    policy, row = tiny_policy("gemma3"), 2 * 16 * 4
    for size, kept in ((20, 3 * 11), (8, 60)):
        for boundaries, sliding in ((True, kept), (False, 11)):
            state = capture_prompt(policy, token_ids(61), chunk_tokens=size, keep_boundaries=boundaries)
            assert state.inventory() == dict.fromkeys(("keys", "values"), row * (60 + 3 * sliding))


def test_a_one_token_prompt_has_an_empty_state():
    state = capture_prompt(tiny_policy("qwen3_5"), PROMPT[:1])
    assert (state.positions, state.nbytes, state.inventory(), state.pages) == (0, 0, {}, ())
    assert "positions=0" in repr(state)


# ---------------------------------------------------------------- checksum


@pytest.mark.parametrize("family", ["qwen3_next", "glm_moe_dsa"])
def test_the_checksum_notices_a_write_to_any_tensor(family):
    policy = tiny_policy(family)
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    before = state.checksum()
    assert capture_prompt(policy, PROMPT, chunk_tokens=8).checksum() == before
    seen = {before}
    tensors = [*state.row_tensors(), *state.carry_tensors()]
    for tensor in tensors:
        old = tensor.view(-1)[-1].clone()
        tensor.view(-1)[-1] = torch.nextafter(old, torch.tensor(torch.inf))
        seen.add(state.checksum())
        tensor.view(-1)[-1] = old
    assert len(seen) == 1 + len(tensors)
    assert state.checksum() == before


def test_the_checksum_depends_on_dtype_and_prompt():
    policy = tiny_policy("llama")
    other = PROMPT.clone()
    other[3] = other[3] - 1 if other[3] > 3 else 4
    states = [capture_prompt(p, ids) for p in (policy, tiny_policy("llama", torch.bfloat16)) for ids in (PROMPT, other)]
    assert len({state.checksum() for state in states}) == 4


# ---------------------------------------------------------------- refusals


def calls_with(policy: Policy, state: ResidentState) -> list:
    response = [5, 6]
    return [
        lambda **extra: score_responses(policy, state, [response], **extra),
        lambda **extra: sample_responses(policy, state, 1, max_new_tokens=1, seed=0, **extra),
        lambda **extra: update_step(
            policy, PROMPT, [response], advantages=[1.0], state=state, gradient_scope="response_only", **extra
        ),
    ]


def test_a_stale_state_is_refused_unless_asked_for():
    policy = tiny_policy("llama")
    state = capture_prompt(policy, PROMPT)
    assert state.weight_version == policy.weight_version == 0
    with torch.no_grad():
        policy.model.model.norm.weight.add_(0.1)
    for call in calls_with(policy, state):
        with pytest.raises(StaleStateError, match="captured at weight version 0, the policy is at 1"):
            call()
        call(allow_stale=True)
    assert state.weight_version == 0
    assert capture_prompt(policy, PROMPT).weight_version == 1


@pytest.mark.parametrize("scope", ["full", Tail(1), Sampled(0.5)], ids=str)
def test_no_scope_that_walks_the_prompt_takes_a_stale_state(scope):
    policy = tiny_policy("llama")
    state = capture_prompt(policy, PROMPT)
    with torch.no_grad():
        policy.model.model.norm.weight.add_(0.1)
    with pytest.raises(StaleStateError):
        update_step(policy, PROMPT, [[5]], advantages=[1.0], state=state, gradient_scope=scope, allow_stale=True)


def test_a_state_of_another_policy_is_refused_whatever_its_weights():
    policy = tiny_policy("llama")
    twin = Policy(policy.model)
    for call in calls_with(policy, capture_prompt(twin, PROMPT)):
        with pytest.raises(InvalidInputError, match="captured by another policy"):
            call()
        with pytest.raises(InvalidInputError, match="captured by another policy"):
            call(allow_stale=True)


def test_a_state_of_the_reference_is_refused_and_the_other_way_round():
    policy = lora_policy("llama")
    assert policy.reference is not None
    with pytest.raises(InvalidInputError, match="or by its reference"):
        score_responses(policy, capture_prompt(policy.reference, PROMPT), [[5]])
    with pytest.raises(InvalidInputError, match="or by its reference"):
        score_responses(policy.reference, capture_prompt(policy, PROMPT), [[5]])


def test_a_state_of_another_prompt_is_refused_by_a_step():
    policy = tiny_policy("llama")
    with pytest.raises(InvalidInputError, match="another prompt"):
        update_step(policy, token_ids(30, seed=1), [[5]], advantages=[1.0], state=capture_prompt(policy, PROMPT))
    with pytest.raises(InvalidInputError, match="another prompt"):
        update_step(policy, PROMPT[:-1], [[5]], advantages=[1.0], state=capture_prompt(policy, PROMPT))


def test_a_state_does_not_follow_what_the_caller_does_to_the_prompt():
    policy, prompt = tiny_policy("llama"), PROMPT.clone()
    state = capture_prompt(policy, prompt)
    prompt.fill_(7)
    assert torch.equal(state.prompt_ids, PROMPT)
