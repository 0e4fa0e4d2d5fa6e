"""Gemma 3 text models: sliding-window and full attention layers, scaled embeddings, optional final soft cap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.architectures.base import Adapter, ChunkRun
from workbench.architectures.config_check import DECODER_FIELDS
from workbench.architectures.stock_attention import ATTENTION_NAME, run_stock_layer
from workbench.ops.logprobs import Head


class Gemma3Adapter(Adapter):
    """rows: keys, values [1, Hkv, tokens, head_dim], after rotary embedding; sliding layers keep window - 1."""

    model_types = ("gemma3_text",)
    attention_name = ATTENTION_NAME
    handled = DECODER_FIELDS | {
        "hidden_activation",
        "query_pre_attn_scalar",
        "sliding_window",
        "layer_types",
        "final_logit_softcapping",
    }
    ignored = {
        "attention_dropout": "dropout is off in every pass",
        "sliding_window_pattern": "already expanded into layer_types",
        "_sliding_window_pattern": "already expanded into layer_types",
    }
    required = {"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)}

    def row_limit(self, layer: int) -> int | None:
        if self.config.layer_types[layer] == "sliding_attention":
            return self.config.sliding_window - 1
        return None

    def rotary(self, hidden: Tensor, positions: Tensor) -> Any:
        kinds = dict.fromkeys(self.config.layer_types)
        return {kind: self.base.rotary_emb(hidden, positions, kind) for kind in kinds}

    def run_layer(self, index: int, hidden: Tensor, run: ChunkRun, *, state_only: bool = False) -> Tensor | None:
        layer, rotary = self.base.layers[index], run.rotary[self.config.layer_types[index]]
        return run_stock_layer(layer, index, hidden, run, state_only=state_only, position_embeddings=rotary)

    def embedding_scale(self) -> Tensor:
        return self.base.embed_tokens.embed_scale

    def head(self) -> Head:
        cap = self.config.final_logit_softcapping
        return Head(self.causal_lm.lm_head, None if cap is None else lambda logits: torch.tanh(logits / cap) * cap)
