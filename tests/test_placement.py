"""Rows in host memory, staged a layer at a time: the same numbers, the same bytes, one layer at a time."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests import oracle
from workbench import (
    InvalidInputError,
    ObjectiveConfig,
    Policy,
    capture_prompt,
    sample_responses,
    score_responses,
    update_step,
)
from workbench.model_sources import TINY_FAMILIES, tiny_model
from workbench.state.pages import Page
from workbench.state.placement import LayerStager
from workbench.types import Tally

PROMPT = torch.randint(3, 101, (61,), generator=torch.Generator().manual_seed(1))
RESPONSES = [torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 7, 12)]


def step(model: Any, **options: Any) -> tuple[Any, oracle.Gradients]:
    report = update_step(
        Policy(model), PROMPT, RESPONSES, advantages=[1.0, -0.5, 0.7], chunk_tokens=16, block_tokens=5, **options
    )
    return report, oracle.take_gradients(model)


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("scope", ["full", "response_only"])
def test_host_and_device_give_the_same_bits(family: str, scope: str) -> None:
    model = tiny_model(family)
    device, on_device = step(model, gradient_scope=scope, checkpoint_layers=True)
    host, on_host = step(model, gradient_scope=scope, placement="host")
    assert host.loss == device.loss
    assert all(torch.equal(a, b) for a, b in zip(host.logprobs, device.logprobs, strict=True))
    assert on_host.keys() == on_device.keys()
    assert all(torch.equal(on_host[name], on_device[name]) for name in on_device)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "glm_moe_dsa"])
def test_scores_and_samples_are_the_same_bits(family: str) -> None:
    policy = Policy(tiny_model(family))
    device, host = (capture_prompt(policy, PROMPT, chunk_tokens=16, placement=where) for where in ("device", "host"))
    assert host.placement == "host"
    assert host.checksum() == device.checksum()
    assert host.inventory() == device.inventory()
    scores = zip(score_responses(policy, host, RESPONSES), score_responses(policy, device, RESPONSES), strict=True)
    assert all(torch.equal(a, b) for a, b in scores)
    samples = (sample_responses(policy, state, 3, max_new_tokens=6, seed=0) for state in (host, device))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(*samples, strict=True))


def test_the_references_rows_lie_where_the_policys_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, or as the given state has them; in the same chunks."""
    policy = Policy(tiny_model("llama"), reference=tiny_model("llama", 1))
    prompt, captured = torch.arange(3, 60), []

    def noting(of: Policy, *arguments: Any, **options: Any) -> Any:
        captured.append((of is policy.reference, options["placement"], options["chunk_tokens"]))
        return capture_prompt(of, *arguments, **options)

    monkeypatch.setattr(sys.modules["workbench.update"], "capture_prompt", noting)
    options: Any = {"rewards": [0.0, 1.0], "objective": ObjectiveConfig(beta=0.1)}
    update_step(policy, prompt, [[4, 5], [6]], placement="host", chunk_tokens=16, **options)
    assert captured == [(True, "host", 16), (False, "host", 16)]
    captured.clear()
    state = capture_prompt(policy, prompt, chunk_tokens=8, placement="host")
    update_step(policy, prompt, [[4, 5], [6]], state=state, **options)
    assert captured == [(True, "host", 8)]


def test_one_layer_is_staged_at_a_time() -> None:
    """Asking for a layer drops the one before; asking again for the same layer copies nothing."""
    pages = [Page(start, start + 4, tuple({"keys": torch.randn(1, 2, 4, 8)} for _ in range(3))) for start in (0, 4)]
    tally = Tally()
    stager = LayerStager(torch.device("cpu"), tally)
    first = stager.rows(pages, pages[0], 0)["keys"]
    assert torch.equal(first, pages[0].layers[0]["keys"])
    assert first.data_ptr() != pages[0].layers[0]["keys"].data_ptr(), "staging copies, also where both places are one"
    assert stager.rows(pages, pages[0], 0)["keys"] is first
    stager.rows(pages, pages[1], 0)
    assert tally["bytes_staged"] == 2 * first.nbytes
    stager.rows(pages, pages[0], 1)
    assert stager.rows(pages, pages[0], 0)["keys"] is not first
    assert tally["layers_staged"] == 3


def test_staged_bytes_are_one_layers_share_of_the_rows() -> None:
    """Beyond what device placement needs, the peak holds the staged copy of one layer, not of all four."""
    options: dict[str, Any] = {"gradient_scope": "response_only", "chunk_tokens": 256, "advantages": [1.0]}
    prompt = torch.randint(3, 101, (4097,), generator=torch.Generator().manual_seed(2))

    def peak(**more: Any) -> Any:
        return update_step(Policy(tiny_model("glm_moe_dsa")), prompt, [RESPONSES[1]], **options, **more).memory

    device, host = peak(checkpoint_layers=True), peak(placement="host")
    assert host["peak_bytes"] - device["peak_bytes"] <= 0.3 * host["rows"]


class StandInStream:
    """As much of a CUDA stream as staging uses: `order` notes who waits for whom, and what is copied meanwhile."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def wait_stream(self, other: Any) -> None:
        self.order.append("wait")


def test_the_next_layer_is_fetched_on_a_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's path on stand-in streams: ahead in the pass's direction, one layer at most, waited for before its use."""
    order: list[str] = []
    page = Page(0, 4, tuple({"keys": torch.full((1, 1, 4, 2), float(i))} for i in range(4)))
    stager = LayerStager(torch.device("cpu"))
    stager._stream = StandInStream(order)  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: StandInStream(order))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: order.append("record"))
    for layer, ahead in ((0, 1), (1, 2), (2, 3), (1, 0), (0, None)):
        rows = stager.rows([page], page, layer)["keys"]
        assert float(rows.unique()) == layer
        assert stager._ahead_layer == ahead
        assert [float(x["keys"].unique()) for x in stager._ahead.values()] == ([] if ahead is None else [ahead])
    # layers 1 and 2 were ahead; turning back finds layer 3 fetched in vain and stages 1 at once; 0 was ahead again
    assert order == ["wait", "record"] * 3


def test_counters_say_what_was_staged() -> None:
    """Every chunk of the capture stages the pages before it, layer by layer; the last layer's attention never runs."""
    policy, tally = Policy(tiny_model("glm_moe_dsa")), Tally()
    state = capture_prompt(policy, PROMPT, chunk_tokens=16, placement="host", tally=tally)
    row_bytes = [sum(t.nbytes for t in rows.values()) // 16 for rows in state.pages[0].layers]
    assert tally["layers_staged"] == 3 * 3
    assert tally["bytes_staged"] == (16 + 32 + 48) * sum(row_bytes[:-1])
    host, _ = step(tiny_model("glm_moe_dsa"), placement="host")
    assert host.counters["bytes_staged"] > tally["bytes_staged"]
    assert host.counters["layers_staged"] > tally["layers_staged"]
    assert host.counters["rows_on_host_bytes"] == state.nbytes
    device, _ = step(tiny_model("glm_moe_dsa"))
    assert [device.counters[name] for name in ("bytes_staged", "layers_staged", "rows_on_host_bytes")] == [0, 0, 0]


def test_bad_placements_are_refused() -> None:
    policy = Policy(tiny_model("qwen3"))
    with pytest.raises(InvalidInputError, match="placement='disk' is not one of device, host"):
        capture_prompt(policy, PROMPT, placement="disk")
    state = capture_prompt(policy, PROMPT)
    with pytest.raises(InvalidInputError, match="reaches nothing: the given state lives on the device"):
        update_step(policy, PROMPT, RESPONSES, advantages=[1.0, 0.0, 0.0], state=state, placement="host")
