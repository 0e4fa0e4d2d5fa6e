"""Gated DeltaNet hybrids: Qwen3-Next and Qwen3.5 / 3.6 text models, dense or with routed experts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from workbench.architectures.base import Adapter, ChunkRun, replaced
from workbench.architectures.config_check import DECODER_FIELDS
from workbench.architectures.stock_attention import ATTENTION_NAME, run_stock_layer
from workbench.comm import Shard
from workbench.ops.gated_delta import chunk_gated_delta_rule, rule_of
from workbench.ops.sharded_gated_delta import over_ranks

# The recurrence runs in this package's own kernel: that transformers' would be slow without flash-linear-attention is
# of no concern here, and the hint would stand in every notebook.
logging.getLogger("transformers.integrations.hub_kernels").addFilter(
    lambda record: "falling back to its reference PyTorch implementation" not in record.getMessage()
)


class GatedDeltaAdapter(Adapter):
    """Full attention layers have rows (keys, values); Gated DeltaNet layers have a carry:

    recurrent [batch, value heads, key dim, value dim] float32 and conv [batch, channels, kernel - 1].
    Experts are chosen by the same computation on the same chunk in every pass, so routing repeats exactly.
    """

    model_types = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    attention_name = ATTENTION_NAME
    handled = DECODER_FIELDS | {
        "hidden_act",
        "partial_rotary_factor",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "layer_types",
        "decoder_sparse_step",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "num_experts_per_tok",
        "num_experts",
        "norm_topk_prob",
        "mlp_only_layers",
    }
    ignored = {
        "attention_dropout": "dropout is off in every pass",
        "full_attention_interval": "already expanded into layer_types",
        "output_router_logits": "only read by the stock training loss",
        "router_aux_loss_coef": "only read by the stock training loss",
        "mtp_num_hidden_layers": "multi-token prediction layers are not loaded",
        "mtp_use_dedicated_embeddings": "multi-token prediction layers are not loaded",
    }
    required = {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}

    def run_layer(self, index: int, hidden: Tensor, run: ChunkRun, *, state_only: bool = False) -> Tensor | None:
        attends = self.config.layer_types[index] == "full_attention"
        with nullcontext() if attends or run.context.shard is None else self._rules_over_ranks(run.context.shard):
            return run_stock_layer(
                self.base.layers[index],
                index,
                hidden,
                run,
                state_only=state_only,
                attends=attends,
                position_embeddings=run.rotary,
            )

    @contextmanager
    def _rules_over_ranks(self, shard: Shard) -> Iterator[None]:
        """The stock module chooses a rule by its own tokens; over ranks the choice is made by all ranks' tokens."""
        modeling = sys.modules[type(self.base).__module__]
        rule = over_ranks(shard, modeling.torch_chunk_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule)
        with (
            replaced(modeling, "torch_chunk_gated_delta_rule", rule),
            replaced(modeling, "torch_recurrent_gated_delta_rule", rule),
        ):
            yield

    @contextmanager
    def kernels(self, *, decoding: bool) -> Iterator[None]:
        """Use this package's rule, which takes flash-linear-attention's kernels where they serve, and count its calls.

        Single-token blocks go through it as well: the stock single-token kernel is a different computation, so a block
        of one token would not score as it replays. Decoding keeps it.
        """
        modeling = sys.modules[type(self.base).__module__]
        step_rule = modeling.torch_recurrent_gated_delta_rule if decoding else self._counted_rule
        with (
            replaced(modeling, "torch_chunk_gated_delta_rule", self._counted_rule),
            replaced(modeling, "torch_recurrent_gated_delta_rule", step_rule),
        ):
            yield

    def _counted_rule(self, query: Tensor, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        self.kernel_calls[f"gated delta rule, {rule_of(query)}"] += 1
        return chunk_gated_delta_rule(query, *inputs, **options)
