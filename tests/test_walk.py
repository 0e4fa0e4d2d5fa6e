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
