"""Dense attention with grouped heads: Llama and Qwen3."""

from __future__ import annotations

from torch import Tensor

from workbench.architectures.base import Adapter, ChunkRun
from workbench.architectures.config_check import DECODER_FIELDS
from workbench.architectures.stock_attention import ATTENTION_NAME, run_stock_layer


class DenseAdapter(Adapter):
    """rows: keys, values [1, Hkv, tokens, head_dim], after rotary embedding. No carry."""

    model_types = ("llama", "qwen3")
    attention_name = ATTENTION_NAME
    handled = DECODER_FIELDS | {
        "hidden_act",
        "mlp_bias",
    }
    ignored = {
        "attention_dropout": "dropout is off in every pass",
        "pretraining_tp": "not read by transformers 5",
        "sliding_window": "only used with use_sliding_window, which is refused",
        "max_window_layers": "only used with use_sliding_window, which is refused",
        "layer_types": "all full_attention unless use_sliding_window, which is refused",
    }
    required = {"use_sliding_window": (False,)}

    def run_layer(self, index: int, hidden: Tensor, run: ChunkRun, *, state_only: bool = False) -> Tensor | None:
        layer = self.base.layers[index]
        return run_stock_layer(layer, index, hidden, run, state_only=state_only, position_embeddings=run.rotary)
