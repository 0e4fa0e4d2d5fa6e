"""Multi-head latent attention with sparse selection and routed experts: GLM-MoE-DSA (GLM-5.x) and DeepSeek-V3.2.

The attention runs in absorbed form: the key up-projection moves to the query and the value up-projection to the output,
so attention is over [latent, rotary key] with a single key head that also serves as value. That is algebraically the
model's own attention, and it lets latents stay compressed in their pages. The stock forward is replaced here because
it expands every latent of the prompt for every chunk and because its `topk` leaves ties undefined.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from workbench.architectures.base import Adapter, ChunkRun, LayerView, noted_routing
from workbench.architectures.config_check import DECODER_FIELDS
from workbench.comm import Shard
from workbench.errors import UnsupportedModelError
from workbench.ops.attention import paged_attention
from workbench.ops.selected_attention import selected_attention
from workbench.ops.selection import stream_topk
from workbench.ops.sharded_attention import sharded_paged_attention, sharded_selected_attention
from workbench.ops.sharded_selection import sharded_topk
from workbench.state.pages import LayerState
from workbench.types import accumulation_dtype


class LatentSparseAdapter(Adapter):
    """rows: latents [1, 1, tokens, kv_lora_rank + rope] (normalised latent, rotated key) in every layer, and
    index_keys [1, 1, tokens, index_head_dim] in layers that compute an index. No carry.

    "shared" index layers reuse the selection of the last "full" layer in the same chunk.
    """

    model_types = ("glm_moe_dsa", "deepseek_v32")
    applied_to_prompt_rows = ("kv_b_proj",)
    handled = DECODER_FIELDS | {
        "moe_intermediate_size",
        "n_shared_experts",
        "n_routed_experts",
        "routed_scaling_factor",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "v_head_dim",
        "qk_nope_head_dim",
        "qk_head_dim",
        "n_group",
        "topk_group",
        "num_experts_per_tok",
        "norm_topk_prob",
        "hidden_act",
        "mlp_layer_types",
        "index_topk",
        "index_head_dim",
        "index_n_heads",
        "indexer_types",
    }
    ignored = {
        "attention_dropout": "dropout is off in every pass",
        "output_router_logits": "only read by the stock training loss",
        "mlp_bias": "not read by these families' MLP",
        "first_k_dense_replace": "already expanded into mlp_layer_types",
        "layer_types": "always indexed_attention",
        "index_topk_freq": "already expanded into indexer_types",
        "index_skip_topk_offset": "already expanded into indexer_types",
        "index_topk_pattern": "already expanded into indexer_types",
        "rope_interleave": "the rotary layout is fixed in the family's modules",
        "ep_size": "expert parallel size is not a property of the forward pass",
        "num_nextn_predict_layers": "multi-token prediction layers are not loaded",
        "aux_loss_alpha": "only read by the stock training loss",
        "seq_aux": "only read by the stock training loss",
    }
    required = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}

    def __init__(self, causal_lm: Any) -> None:
        super().__init__(causal_lm)
        biased = [n for n, _ in self.base.named_parameters() if ".kv_b_proj." in n and n.endswith(".bias")]
        if biased:  # such as PEFT's lora_bias; the absorbed form reads the projection as a matrix
            raise UnsupportedModelError(f"{biased[0]}: a latent up-projection with a bias is not supported")

    def run_layer(self, index: int, hidden: Tensor, run: ChunkRun, *, state_only: bool = False) -> Tensor | None:
        layer, view = self.base.layers[index], run.view(index)
        mixed = self._attention(layer.self_attn, layer.input_layernorm(hidden), run, view, state_only)
        if mixed is None:
            return None
        hidden = hidden + mixed
        with noted_routing(layer, index, run):
            return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _attention(self, attn: Any, hidden: Tensor, run: ChunkRun, view: LayerView, state_only: bool) -> Tensor | None:
        batch, tokens, _ = hidden.shape
        rank = attn.kv_lora_rank
        query_latent = attn.q_a_layernorm(attn.q_a_proj(hidden))
        query = attn.q_b_proj(query_latent).view(batch, tokens, -1, attn.qk_head_dim).transpose(1, 2)
        query_plain, query_rope = query.split([attn.qk_nope_head_dim, attn.qk_rope_head_dim], dim=-1)
        latent, key_rope = attn.kv_a_proj_with_mqa(hidden)[:, None].split([rank, attn.qk_rope_head_dim], dim=-1)
        query_rope, key_rope = _modeling(attn).apply_rotary_pos_emb_interleave(query_rope, key_rope, *run.rotary)
        rows = torch.cat([attn.kv_a_layernorm(latent), key_rope], dim=-1)

        new = {"latents": view.real_rows(rows)}
        if attn.indexer is not None and view.index not in run.shared:  # a second pass keeps the first one's selection
            index_keys, selection = self._select(
                attn.indexer, hidden, query_latent, run.rotary, view, keys_only=state_only
            )
            new["index_keys"] = view.real_rows(index_keys)
            run.shared[view.index] = selection
            if selection is not None:
                run.note_choice(view.index, "keys", selection)
        run.layers[view.index] = LayerState(new)
        if state_only:
            return None

        key_up, value_up = _up_projections(attn)
        absorbed = torch.cat([torch.einsum("bhtn,chn->bhtc", query_plain, key_up), query_rope], dim=-1)
        selection = run.shared[max(full for full in run.shared if full <= view.index)]
        out = _attend(absorbed, rows, view, selection, attn.scaling)
        out = torch.einsum("bhtc,chv->bthv", out[..., :rank], value_up)
        return attn.o_proj(out.flatten(2))

    @torch.no_grad()
    def _select(
        self,
        indexer: Any,
        hidden: Tensor,
        query_latent: Tensor,
        rotary: tuple[Tensor, Tensor],
        view: LayerView,
        *,
        keys_only: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The chunk's index keys [batch, 1, tokens, width] and the selected positions [batch, tokens, top-k].

        The selection is None while every visible key fits into the top-k: that is dense attention. keys_only: there
        will be no attention, and nothing is selected. The index takes no gradient, as in the stock model. Scores:
        relu(q . k) summed over index heads with learned weights, in float32.
        """
        batch, tokens, _ = hidden.shape
        rope, width = indexer.qk_rope_head_dim, indexer.head_dim
        stop = view.start + tokens if view.shard is None else view.shard.stop
        dense = stop <= indexer.index_topk
        query = indexer.wq_b(query_latent).view(batch, tokens, indexer.n_heads, width)
        key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
        rotate = _index_rotation(indexer)
        query_rope, key_rope = rotate(query[..., :rope], key[..., :rope], *rotary, unsqueeze_dim=2)
        query = torch.cat([query_rope, query[..., rope:]], dim=-1)
        index_keys = torch.cat([key_rope, key[..., rope:]], dim=-1).transpose(1, 2)
        if dense or keys_only:
            return index_keys, None

        dtype = accumulation_dtype(hidden.dtype)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).to(dtype)
        weights = weights * indexer.n_heads**-0.5
        if view.shard is not None:
            scale = indexer.softmax_scale
            return index_keys, _select_over_ranks(
                query, index_keys, weights, scale, view, view.shard, indexer.index_topk
            )

        def scored_pages() -> Iterator[tuple[int, Tensor, Tensor | None]]:
            for start, keys in view.rows("index_keys"):
                yield start, _index_scores(query, keys, weights, indexer.softmax_scale), None
            causal = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device).tril_()
            yield view.start, _index_scores(query, index_keys, weights, indexer.softmax_scale), causal

        return index_keys, stream_topk(scored_pages(), indexer.index_topk)


def _attend(query: Tensor, rows: Tensor, view: LayerView, selection: Tensor | None, scaling: float) -> Tensor:
    """Attention of absorbed queries over latents, which are key and value; without a selection over every visible one.

    Over ranks, the selection is that of all ranks' tokens.
    """
    shard, memo = view.shard, view.memo
    if selection is None:
        pages = view.attention_pages("latents", "latents")
        if shard is None:
            return paged_attention(query, rows, rows, pages=pages, start=view.start, scaling=scaling, memo=memo)
        return sharded_paged_attention(query, rows, rows, shard=shard, pages=pages, scaling=scaling, memo=memo)
    own, row_pages = rows[:, 0], view.row_pages("latents")
    chosen: dict[str, Any] = {"pages": row_pages, "selection": selection, "scaling": scaling, "memo": memo}
    if shard is None:
        return selected_attention(query, own, start=view.start, **chosen)
    return sharded_selected_attention(query, own, shard=shard, **chosen)


def _select_over_ranks(
    query: Tensor, index_keys: Tensor, weights: Tensor, scale: float, view: LayerView, shard: Shard, topk: int
) -> Tensor:
    """The selection [batch, T, top-k] of all ranks' tokens, from index keys that stay where they are."""
    everyone = shard.gather(shard.real(query, 1), 1, "index queries")
    all_weights = shard.gather(shard.real(weights, 1), 1, "index queries")

    def scored_parts() -> Iterator[tuple[int, Tensor, Tensor | None]]:
        for start, keys in view.rows("index_keys"):
            if keys.shape[-2]:
                yield start, _index_scores(everyone, keys, all_weights, scale), None
        if shard.count:
            own = shard.real(index_keys, 2)
            rows = torch.arange(shard.start, shard.stop, device=own.device)[:, None]
            causal = torch.arange(shard.first, shard.last, device=own.device) <= rows
            yield shard.first, _index_scores(everyone, own, all_weights, scale), causal

    return sharded_topk(scored_parts(), topk, shard, like=all_weights[..., 0])


def _index_scores(query: Tensor, keys: Tensor, weights: Tensor, scale: float) -> Tensor:
    """[batch, tokens, N]: sum over index heads of weight * relu(query . key * scale)."""
    per_head = torch.relu(query.to(weights.dtype) @ keys.to(weights.dtype).transpose(-1, -2) * scale)
    return torch.matmul(weights[:, :, None], per_head)[:, :, 0]


def _up_projections(attn: Any) -> tuple[Tensor, Tensor]:
    """Key and value up-projections, each [rank, heads, width].

    Read by sending the identity through the module, so that a LoRA or quantised projection gives its effective weight,
    with its gradient.
    """
    projection: nn.Module = attn.kv_b_proj
    reference = attn.kv_a_layernorm.weight
    identity = torch.eye(attn.kv_lora_rank, dtype=reference.dtype, device=reference.device)
    both = projection(identity).view(attn.kv_lora_rank, attn.num_heads, -1)
    return tuple(both.split([attn.qk_nope_head_dim, attn.v_head_dim], dim=-1))


def _modeling(module: nn.Module) -> Any:
    """The transformers file that defines a module, for the rotary functions that belong to it."""
    return sys.modules[type(module).__module__]


def _index_rotation(indexer: nn.Module) -> Any:
    """GLM rotates index keys in interleaved pairs, DeepSeek-V3.2 in halves: the family's own function decides."""
    modeling = _modeling(indexer)
    return getattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb_interleave)
