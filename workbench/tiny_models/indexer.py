"""Teaching the index of sparse attention, which takes no gradient from the language-model loss.

Its top-k selection is not differentiable, and transformers runs it without a graph. As in DeepSeek-V3.2's dense warm-up
stage, the model is first trained with every key selected; then the index learns, by Kullback-Leibler divergence, the
distribution of the attention that it will have to select for. An index that several layers share learns the mean over
all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.architectures.base import replaced

_LEARNING_RATE = 3e-3


def _indexers(model: Any) -> dict[int, Any]:
    layers = enumerate(model.model.layers)
    found = {at: getattr(getattr(layer, "self_attn", None), "indexer", None) for at, layer in layers}
    return {at: indexer for at, indexer in found.items() if indexer is not None}


@contextmanager
def dense_selection(model: Any) -> Iterator[None]:
    """Every key is selected: ordinary attention. Nothing changes for a model without an index."""

    def everything(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        batch, tokens = hidden.shape[:2]
        return torch.arange(tokens, dtype=torch.int32).expand(batch, tokens, tokens)

    with ExitStack() as stack:
        for indexer in _indexers(model).values():
            stack.enter_context(replaced(indexer, "forward", everything))
        yield


def teach_index(model: Any, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Iterator[tuple[float, float]]:
    """Train the index alone; yields the loss of each batch and the attention mass within the top-k it selects."""
    indexers = _indexers(model)
    parameters = [parameter for indexer in indexers.values() for parameter in indexer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for ids, _, counted in batches:
        inputs, attention = _observe(model, indexers, ids)
        losses, masses = [], []
        for at, indexer in indexers.items():
            target = torch.stack([attention[layer] for layer in _group(at, indexers, len(model.model.layers))]).mean(0)
            scores = index_scores(indexer, *inputs[at])
            divergence = F.kl_div(torch.log_softmax(scores, dim=-1), target, reduction="none").sum(-1)
            losses.append(divergence.mean() + divergence[counted].mean())  # values asked for are few and matter most
            masses.append(_mass_selected(scores, target, indexer.index_topk, counted))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), sum(masses) / len(masses)


def index_scores(indexer: Any, hidden: Tensor, query_latent: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """What the indexer's forward takes its top-k of, [batch, tokens, tokens], with a graph."""
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb_interleave
    rope, batch, tokens = indexer.qk_rope_head_dim, *hidden.shape[:2]
    query = indexer.wq_b(query_latent).view(batch, tokens, indexer.n_heads, indexer.head_dim)
    key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    query_rope, key_rope = rotate(query[..., :rope], key[..., :rope], *rotary, unsqueeze_dim=2)
    query = torch.cat([query_rope, query[..., rope:]], dim=-1)
    key = torch.cat([key_rope, key[..., rope:]], dim=-1)[:, :, 0]
    per_head = torch.relu(query @ key.transpose(-1, -2)[:, None] * indexer.softmax_scale)
    weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    hidden_keys = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return torch.matmul(weights[:, :, None], per_head)[:, :, 0].masked_fill(hidden_keys, -1e9)


def _group(at: int, indexers: Iterable[int], num_layers: int) -> range:
    """The layers that use the index of layer `at`: itself and the sharing ones behind it."""
    return range(at, min((other for other in indexers if other > at), default=num_layers))


@torch.no_grad()
def _observe(model: Any, indexers: dict[int, Any], ids: Tensor) -> tuple[dict[int, Any], dict[int, Tensor]]:
    """Each index's inputs, and each layer's attention probabilities, mean over heads, with every key selected."""
    inputs: dict[int, Any] = {}
    attention: dict[int, Tensor] = {}

    def keep(at: int) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            attention[at] = out[1].mean(1)

        return hook

    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with dense_selection(model), ExitStack() as stack:
        for at, indexer in indexers.items():
            stack.enter_context(replaced(indexer, "forward", _keeping_inputs(inputs, at, indexer.forward)))
        for at, layer in enumerate(model.model.layers):
            stack.callback(layer.self_attn.register_forward_hook(keep(at)).remove)
        model.model(input_ids=ids, use_cache=False)
    model.set_attn_implementation(implementation)
    return inputs, attention


def _keeping_inputs(inputs: dict[int, Any], at: int, forward: Any) -> Any:
    def keep_and_run(hidden: Tensor, query_latent: Tensor, rotary: Any, *_: Any, **__: Any) -> Tensor:
        inputs[at] = (hidden, query_latent, rotary)
        return forward(hidden)

    return keep_and_run


@torch.no_grad()
def _mass_selected(scores: Tensor, target: Tensor, top_k: int, counted: Tensor) -> float:
    selected = scores.topk(min(top_k, scores.shape[-1]), dim=-1).indices
    return float(target.gather(-1, selected).sum(-1)[counted].mean())
