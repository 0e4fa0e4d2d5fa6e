"""No tensor of block x prefix or of rows x vocabulary is ever made, in capture, scoring, replay or walk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.allocations import LargestStorage
from workbench import Policy, capture_prompt, score_responses, update_step
from workbench.architectures import stock_attention
from workbench.model_sources import tiny_model
from workbench.ops import logprobs
from workbench.ops.attention import paged_attention_reference

FAMILIES = ["qwen3", "gemma3", "qwen3_5", "glm_moe_dsa"]
# Narrow enough for a mask of one byte an element to stand out: block x prefix is 128,000 bytes.
BLOCK, PREFIX = 64, 2000
NARROW: dict[str, dict[str, Any]] = {"glm_moe_dsa": {"index_topk": 6, "moe_intermediate_size": 12}}
RESPONSE, VOCAB = 130, 5003


def largest(family: str, prompt: int, response: int, vocab: int, block: int, **options: Any) -> LargestStorage:
    """The largest storage of a scoring and of a step."""
    model = tiny_model(family, **NARROW.get(family, {}), vocab_size=vocab)
    draw = torch.Generator().manual_seed(0)
    ids, answer = (torch.randint(3, 101, (count,), generator=draw) for count in (prompt, response))
    policy = Policy(model)
    with LargestStorage() as found:
        if options.get("gradient_scope") != "full":
            state = capture_prompt(policy, ids, chunk_tokens=block, keep_boundaries=False)
            score_responses(policy, state, [answer], block_tokens=block)
            del state
        update_step(
            policy,
            ids,
            [answer],
            advantages=[1.0],
            chunk_tokens=block,
            block_tokens=block,
            measure_memory=False,
            **options,
        )
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_block_times_prefix(family: str) -> None:
    """Not even of one byte an element; what is largest does not depend on the prefix.

    Measured (bytes): see LARGEST; a layer's weight gradients, or the scan's sub-chunk matrices.
    """
    found = [largest(family, tokens, 20, 101, BLOCK, gradient_scope="full") for tokens in (PREFIX // 2, PREFIX)]
    assert found[1].nbytes < BLOCK * PREFIX, found[1].shape
    assert found[0].nbytes == found[1].nbytes


@pytest.mark.parametrize("scope", ["full", "response_only"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_rows_times_vocabulary(family: str, scope: str) -> None:
    """A response of 130 tokens in one block: 64 rows of logits at a time, or the head's own weight."""
    found = largest(family, 40, RESPONSE, VOCAB, 256, gradient_scope=scope)
    hidden = tiny_model(family).config.hidden_size
    assert found.nbytes <= max(64, hidden) * VOCAB * 4 < RESPONSE * VOCAB * 4, found.shape


def test_attention_over_a_concatenated_prefix_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def concatenated(*args: Any, memo: Any = None, **options: Any) -> torch.Tensor:
        return paged_attention_reference(*args, **options)

    monkeypatch.setattr(stock_attention, "paged_attention", concatenated)
    assert largest("qwen3", PREFIX // 4, 20, 101, BLOCK, gradient_scope="response_only").nbytes > BLOCK * PREFIX // 4


def test_a_whole_block_of_logits_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "ROWS_AT_ONCE", 256)
    assert largest("qwen3", 40, RESPONSE, VOCAB, 256, gradient_scope="response_only").nbytes >= RESPONSE * VOCAB * 4
