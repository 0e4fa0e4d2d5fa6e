"""The models and data every mode gets: random initialisation, float32, one thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

RESPONSE_TOKENS = 128
VOCAB = 2048
HIDDEN = {"hybrid": 256, "small-hybrid": 128}


def hybrid_config(layers: int = 8, hidden: int = 256) -> Qwen3_5TextConfig:
    """8 layers, 2 of them full attention, 8.3 M parameters by default."""
    width = hidden // 4
    return Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        max_position_embeddings=1 << 20,
    )


def dense_config(layers: int = 4, hidden: int = 256) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1 << 20,
    )


@dataclass(frozen=True)
class Case:
    """family: "hybrid", "dense" or "small-hybrid"; prompt_tokens P; group G."""

    family: str
    prompt_tokens: int
    group: int

    def config(self) -> Any:
        return dense_config() if self.family == "dense" else hybrid_config(hidden=HIDDEN[self.family])

    def model(self) -> Any:
        torch.manual_seed(0)
        return (Qwen3ForCausalLM if self.family == "dense" else Qwen3_5ForCausalLM)(self.config()).eval()

    def data(self) -> tuple[Tensor, list[Tensor], list[float]]:
        draw = torch.Generator().manual_seed(0)
        prompt = torch.randint(3, VOCAB, (self.prompt_tokens,), generator=draw)
        responses = [torch.randint(3, VOCAB, (RESPONSE_TOKENS,), generator=draw) for _ in range(self.group)]
        return prompt, responses, [1.0 if member % 2 else -1.0 for member in range(self.group)]

    def __str__(self) -> str:
        return f"{self.family} P={self.prompt_tokens} G={self.group}"
