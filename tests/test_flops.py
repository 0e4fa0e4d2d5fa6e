"""Operations of every scope, counted, against the planner's formula; and what is not computed is not counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks.problem import VOCAB, dense_config, hybrid_config
from tests.flops import attention_pairs, count_flops
from workbench import Policy, StepReport, Tail, update_step
from workbench.ops.attention import AttentionPage, paged_attention
from workbench.planner import Request
from workbench.planner.families import model_shape
from workbench.planner.flops import exact_gradient_flops, work_by_phase

CONFIGS = {"dense": dense_config, "hybrid": hybrid_config}
PROMPT, RESPONSE, CHUNK, GROUP = 513, 64, 128, 2


def policy_of(family: str) -> Policy:
    from transformers import Qwen3_5ForCausalLM, Qwen3ForCausalLM

    config = CONFIGS[family](layers=4, hidden=128)
    torch.manual_seed(0)
    return Policy((Qwen3ForCausalLM if family == "dense" else Qwen3_5ForCausalLM)(config).eval())


def run(policy: Policy, **options: Any) -> StepReport:
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, VOCAB, (PROMPT,), generator=draw)
    responses = [torch.randint(3, VOCAB, (RESPONSE,), generator=draw) for _ in range(GROUP)]
    return update_step(
        policy, prompt, responses, advantages=[1.0, -1.0], chunk_tokens=CHUNK, measure_memory=False, **options
    )


def planned(policy: Policy, **options: Any) -> float:
    shape = model_shape(policy.adapter.config, "measured")
    request = Request(
        positions=PROMPT + RESPONSE,
        group_size=GROUP,
        response_tokens=RESPONSE,
        chunk_tokens=CHUNK,
        weights="fp32",
        training="full",
        optimizer="none",
        **options,
    )
    return sum(work.flops for work in work_by_phase(shape, request).values())


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("scope", ["response_only", Tail(2), "full"], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_operations_of_a_step_are_the_formulas(family: str, scope: Any, checkpoint_layers: bool) -> None:
    """Dense: to the operation. Hybrid: within 1 %."""
    policy = policy_of(family)
    options = {"gradient_scope": scope, "checkpoint_layers": checkpoint_layers}
    ratio = count_flops(lambda: run(policy, **options)) / planned(policy, **options)
    print(family, scope, checkpoint_layers, ratio)
    assert ratio == pytest.approx(1.0, rel=1e-9 if family == "dense" else 0.01)


def test_the_comparison_can_fail() -> None:
    policy = policy_of("dense")
    counted = count_flops(lambda: run(policy, gradient_scope="full"))
    assert counted != pytest.approx(planned(policy, gradient_scope=Tail(3)), rel=0.05)


def test_rows_that_take_no_gradient_cost_three_products_instead_of_five() -> None:
    """The backward of one page: dQ alone is 3 / 5 of the flash kernel's, and adds nothing but that."""
    shape = (1, 4, 32, 16)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=draw, requires_grad=True) for _ in range(3))
    rows = [torch.randn(1, 4, 96, 16, generator=draw) for _ in range(2)]
    counts = {}
    for name, sink in (("wanted", lambda dkey, dvalue: None), ("not wanted", None)):
        page = AttentionPage(rows[0], rows[1], 0, sink)
        out = paged_attention(query, key, value, pages=[page], start=96, scaling=0.25)
        counts[name] = count_flops(lambda out=out: out.sum().backward())
    page_product = 2 * 16 * attention_pairs(shape, (1, 4, 96, 16), False)
    assert counts["wanted"] - counts["not wanted"] == 2 * page_product


def test_a_step_never_does_less_than_the_limit() -> None:
    """The limit leaves out what is computed again; a full step does 1.3 to 2 times of it."""
    for family in CONFIGS:
        policy = policy_of(family)
        sizes = {"prompt_tokens": PROMPT, "response_tokens": RESPONSE, "group_size": GROUP}
        limit = exact_gradient_flops(model_shape(policy.adapter.config, family), **sizes)
        assert 1.2 < count_flops(lambda policy=policy: run(policy)) / limit < 2.0
