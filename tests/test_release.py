"""A step frees the rows that its walk has passed, if it captured them itself; a given state stays whole."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from tests.helpers import tiny_policy, token_ids
from workbench import Policy, ResidentState, capture_prompt, update_step
from workbench import prompt_gradient as prompt_gradient_module
from workbench import update as update_module

CHUNK, PROMPT = 16, 100


def step(policy: Policy, state: ResidentState | None) -> dict[str, torch.Tensor]:
    policy.model.zero_grad(set_to_none=True)
    update_step(
        policy, token_ids(PROMPT), [token_ids(9, 1)], advantages=[1.0], chunk_tokens=CHUNK, state=state,
    )  # fmt: skip
    return {name: p.grad for name, p in policy.trainable_parameters() if p.grad is not None}


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(pages whose rows are alive, pages that the chunk sees) at the start of every walked chunk."""
    rows: list[list[weakref.ref[torch.Tensor]]] = []
    counts: list[tuple[int, int]] = []
    capture, run_segment = update_module.capture_prompt, prompt_gradient_module.run_segment

    def watched_capture(*args: Any, **options: Any) -> ResidentState:
        state = capture(*args, **options)
        rows.extend([weakref.ref(tensor) for tensor in page.tensors()] for page in state.pages)
        return state

    def watched_segment(policy: Policy, segment: Any, *args: Any, **options: Any) -> Any:
        counts.append((sum(any(r() is not None for r in page) for page in rows), len(segment.pages)))
        return run_segment(policy, segment, *args, **options)

    monkeypatch.setattr(update_module, "capture_prompt", watched_capture)
    monkeypatch.setattr(prompt_gradient_module, "run_segment", watched_segment)
    return counts


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm_moe_dsa"])
def test_rows_are_freed_as_the_walk_passes_them(family: str, alive: list[tuple[int, int]]) -> None:
    """The chunk being walked makes its own rows again, so only earlier ones are alive."""
    step(tiny_policy(family), None)
    assert alive == [(index, index) for index in range(6, -1, -1)]


def test_a_state_that_was_handed_in_stays_whole() -> None:
    policy = tiny_policy("qwen3_5")
    state = capture_prompt(policy, token_ids(PROMPT), chunk_tokens=CHUNK)
    before = state.checksum()
    first = step(policy, state)
    assert state.checksum() == before
    assert len(state.pages) == 7
    again, own = step(policy, state), step(policy, None)
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], own[name]) for name in first)
