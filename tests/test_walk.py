"""The reverse walk's two ways to hold a graph, and its guard against another choice of keys or experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import oracle
from workbench import NonDeterministicError, Policy, capture_prompt, load_policy, update_step
from workbench.model_sources import TINY_FAMILIES, tiny_model
from workbench.ops.attention import AttentionMemo

PROMPT = torch.randint(3, 101, (61,), generator=torch.Generator().manual_seed(1))
RESPONSES = [torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 7, 12)]


def gradient(model: Any, **options: Any) -> tuple[Any, oracle.Gradients]:
    report = update_step(
        Policy(model), PROMPT, RESPONSES, advantages=[1.0, -0.5, 0.7], chunk_tokens=16, block_tokens=5, **options
    )
    return report, oracle.take_gradients(model)


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("scope", ["full", "response_only"])
def test_layer_by_layer_is_the_whole_graph(family: str, scope: str) -> None:
    """float64: measured bitwise equal in all families (0.0); the bound leaves room for another order of sums."""
    model = tiny_model(family).double()
    _, whole = gradient(model, gradient_scope=scope)
    _, layered = gradient(model, gradient_scope=scope, checkpoint_layers=True)
    assert oracle.relative_l2(layered, whole) <= 1e-14


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "glm_moe_dsa"])
def test_layer_by_layer_with_lora(family: str) -> None:
    """A frozen embedding and frozen base: nothing below the first adapter needs a gradient."""
    policy = load_policy(tiny_model(family).double(), lora={"r": 3})
    found = []
    for checkpoint_layers in (False, True):
        update_step(
            policy,
            PROMPT,
            RESPONSES,
            advantages=[1.0, -0.5, 0.7],
            chunk_tokens=16,
            checkpoint_layers=checkpoint_layers,
        )
        found.append(oracle.take_gradients(policy.model))
    assert oracle.relative_l2(found[1], found[0]) <= 1e-14


def test_layer_by_layer_holds_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph bytes of 8 layers, layer by layer: measured 0.27 of the whole graph (1/8 and the layers' inputs)."""
    model = tiny_model("qwen3", num_hidden_layers=8)
    prompt = torch.randint(3, 101, (600,), generator=torch.Generator().manual_seed(2))

    def graph(**options: Any) -> int:
        return update_step(Policy(model), prompt, RESPONSES[1:2], advantages=[1.0], chunk_tokens=256, **options).memory[
            "graph"
        ]

    assert graph(checkpoint_layers=True) < 0.35 * graph()


def test_layer_by_layer_does_not_repeat_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention runs once per pass: the second pass takes the first one's result."""
    from workbench.ops import attention

    computed = []
    forward = attention._forward
    monkeypatch.setattr(attention, "_forward", lambda *a: computed.append(1) or forward(*a))
    model = tiny_model("qwen3", num_hidden_layers=3)
    gradient(model)
    whole = len(computed)
    computed.clear()
    gradient(model, checkpoint_layers=True)
    assert len(computed) == whole
    assert AttentionMemo().result is None


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "glm_moe_dsa", "deepseek_v32"])
@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_every_choice_of_the_capture_is_repeated_by_the_walk(family: str, checkpoint_layers: bool) -> None:
    """Also when experts tie exactly: all experts' router rows are equal in one layer."""
    model = tiny_model(family)
    with torch.no_grad():
        gate = model.model.layers[-2 if family != "qwen3_next" else 1].mlp.gate
        gate.weight.copy_(gate.weight[:1].expand_as(gate.weight))
    policy = Policy(model)
    state = capture_prompt(policy, PROMPT, chunk_tokens=16)
    kinds = {kind for index in range(len(state.pages)) for _, kind in state.choices_of(index)}
    assert kinds == ({"experts", "keys"} if hasattr(model.config, "index_topk") else {"experts"})
    update_step(
        policy, PROMPT, RESPONSES, advantages=[1.0, -0.5, 0.7], state=state, checkpoint_layers=checkpoint_layers
    )


@pytest.mark.parametrize("family", ["qwen3_5_moe", "glm_moe_dsa"])
def test_another_choice_is_refused_and_changes_nothing(family: str) -> None:
    """A router that decides otherwise the second time it sees a chunk must not give a gradient."""
    model = tiny_model(family)
    policy = Policy(model)
    state = capture_prompt(policy, PROMPT, chunk_tokens=16)
    gate = model.model.layers[1].mlp.gate
    handle = gate.register_forward_hook(lambda _, __, out: (out[0], out[1], out[2].flip(0)), prepend=True)
    try:
        with pytest.raises(NonDeterministicError, match=r"chunk \[48, 60\): layer 1 selects other experts"):
            update_step(policy, PROMPT, RESPONSES, advantages=[1.0, -0.5, 0.7], state=state)
    finally:
        handle.remove()
    assert all(p.grad is None for p in model.parameters())


def test_a_response_block_must_repeat_its_choices_too() -> None:
    """All blocks but the last run twice: a router that decides otherwise when a graph is built is refused."""
    model = tiny_model("glm_moe_dsa")
    gate = model.model.layers[1].mlp.gate
    flip = lambda _, __, out: (out[0], out[1], out[2].flip(0)) if torch.is_grad_enabled() else out  # noqa: E731
    gate.register_forward_hook(flip, prepend=True)
    with pytest.raises(NonDeterministicError, match=r"response 1, tokens \[0, 5\): layer 1 selects other experts"):
        gradient(model, gradient_scope="response_only")
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", ["glm_moe_dsa", "qwen3_5_moe", "qwen3"])
def test_counters_say_how_many_choices_were_verified(family: str) -> None:
    """By layer and kind, for each of 4 prompt chunks, 0 + 1 + 2 response blocks that run twice, and rebuilt layers.

    A prompt chunk stops before its last layer's experts. With layer checkpoints all 6 blocks and 4 chunks are rebuilt,
    experts chosen again and keys reused.
    """
    chunks, twice, blocks = 4, 0 + 1 + 2, 1 + 2 + 3
    keys, experts = {"glm_moe_dsa": (2, 3), "qwen3_5_moe": (0, 4), "qwen3": (0, 0)}[family]
    last = 1 if experts else 0
    once = chunks * (keys + experts - last) + twice * (keys + experts)
    model = tiny_model(family)
    report, _ = gradient(model)
    assert report.counters["choices_verified"] == once
    report, _ = gradient(model, checkpoint_layers=True)
    assert report.counters["choices_verified"] == once + chunks * (experts - last) + blocks * experts
    assert gradient(model, gradient_scope="response_only")[0].counters["choices_verified"] == twice * (keys + experts)
