"""Golden values of the size formulas, to the byte: one test per vector, each also an independent published number."""

from __future__ import annotations

import pytest

from workbench.planner import find_gpu, find_model, plan
from workbench.planner import sizes as s
from workbench.planner.flops import attention_flops, layer_attention_flops
from workbench.planner.request import Request

QWEN, GLM = find_model("Qwen3.6-27B"), find_model("GLM-5.2")


def request(positions: int, cp: int, **options: object) -> Request:
    fields = {"group_size": 8, "response_tokens": 8192, "positions": positions, "context_parallel": cp}
    return Request(**(fields | options))  # type: ignore[arg-type]


def test_1_rows_per_token() -> None:
    assert s.row_bytes_per_token(QWEN, 2) == 16 * 2 * 4 * 256 * 2 == 65_536


@pytest.mark.parametrize(("positions", "expected"), [(2_097_152, 17_179_869_184), (4_456_448, 36_507_222_016)])
def test_2_and_3_rows_per_rank(positions: int, expected: int) -> None:
    assert s.rows_bytes(QWEN, request(positions, 8)) == expected


def test_4_recurrent_state() -> None:
    state = sum(count * layer.mixer.carry_fp32_elements * 4 for layer, count in QWEN.groups)
    assert state == 48 * 48 * 128 * 128 * 4 == 150_994_944
    assert s.carry_bytes(QWEN, 2) == state + 48 * (2 * 16 * 128 + 48 * 128) * 3 * 2 == 153_944_064


def test_6_lora_and_its_adamw() -> None:
    asked = request(2_097_152, 8)
    assert s.trained_params(QWEN, asked) == 116_727_808
    total = s.adapter_bytes(QWEN, asked) + s.gradient_bytes(QWEN, asked) + s.optimizer_bytes(QWEN, asked)
    assert total == 1_867_644_928


def test_8_row_gradients() -> None:
    assert s.gradient_pages_bytes(QWEN, request(2_097_152, 8, gradient_scope="full")) == 34_359_738_368


def test_9_layer_checkpoints_of_conventional_training() -> None:
    assert s.layer_inputs_bytes(QWEN, 2_097_152 // 8, 2) == 262_144 * 64 * 5_120 * 2 == 171_798_691_840


def test_10_boundary_carries() -> None:
    asked = request(2_097_152, 8, chunk_tokens=32_768)
    tails = 48 * (2 * 16 * 128 + 48 * 128) * 3 * 2  # not split: the first rank keeps them, and has most
    assert s.boundary_carries_bytes(QWEN, asked) == 64 * ((153_944_064 - tails) // 8 + tails) == 1_396_703_232


def test_11_latent_rows() -> None:
    assert s.row_bytes_per_token(GLM, 2) == 78 * (512 + 64) * 2 + 21 * 128 * 2 == 95_232
    asked = request(2_097_152, 32, response_tokens=3, expert_parallel=32)
    assert s.rows_bytes(GLM, asked) == 6_241_124_352


def test_13_logits() -> None:
    assert s.logits_bytes(1024, 248_320, 4) == 1_017_118_720


def test_14_ceiling() -> None:
    assert find_gpu("H20-3e").memory_bytes == 143_771 * 2**20 == 150_754_820_096


def test_16_attention_operations() -> None:
    n = 2_097_152
    assert attention_flops(QWEN, 0, n) == 4 * 6_144 * 16 * n * (n + 1) // 2 == 864_691_540_771_995_648


def test_the_vectors_reach_the_plan() -> None:
    """The same bytes, through the front door."""
    planned = plan(
        "Qwen3.6-27B", "H20-3e", positions=2_097_152, group_size=8, response_tokens=8192, context_parallel=8,
        gradient_scope="full", chunk_tokens=32_768,
    )  # fmt: skip
    walk = planned.terms["prompt_gradient"]
    assert (walk["rows"], walk["gradient_pages"], walk["boundary_carries"]) == (
        17_179_869_184,
        34_359_738_368,
        1_396_703_232,
    )
    assert walk["adapter"] + walk["optimizer"] == 1_867_644_928


def test_glm_host_pages_are_exact() -> None:
    """Published: 5.8125 GiB per rank, 186 GiB over 32 ranks."""
    planned = plan(
        "GLM-5.2", "H20-3e", positions=2_097_152, group_size=2, response_tokens=3, context_parallel=32,
        expert_parallel=32, placement="host", gradient_scope="response_only", weights="bf16", lora_rank=8,
    )  # fmt: skip
    assert planned.host_bytes == 6_241_124_352 == 5.8125 * 2**30
    assert planned.terms["capture"]["rows"] == 0


@pytest.mark.parametrize("what", ["rows", "carry"])
def test_the_vectors_can_fail(what: str) -> None:
    """A quarter of the layers has rows, the others a carry: charging them all is what other planners do."""
    layers = len(QWEN.layers)
    if what == "rows":
        assert s.row_bytes_per_token(QWEN, 2) * 4 == layers * 2 * 4 * 256 * 2
    else:
        assert sum(count for layer, count in QWEN.groups if layer.mixer.carry_elements) == layers * 3 // 4


def test_sparse_attention_operations_match_the_published_split() -> None:
    """GLM-5.2 at 2.1M: sparse attention 4.7e16, the indexer 3.8e17, which is the quadratic term."""
    n = 2_097_152
    shared = next(layer for layer in GLM.layers if layer.mixer.kind == "latent_shared")
    indexed = next(layer for layer in GLM.layers if layer.mixer.kind == "latent_indexed")
    sparse = layer_attention_flops(shared, 0, n)
    index = layer_attention_flops(indexed, 0, n) - sparse
    assert 78 * sparse == pytest.approx(4.7e16, rel=0.01)
    assert 21 * index == pytest.approx(3.8e17, rel=0.01)
