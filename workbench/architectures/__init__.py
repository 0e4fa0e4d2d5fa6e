"""Registry of architecture adapters. Families import nothing from each other; only this file knows them all."""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench.architectures.base import Adapter, ChunkContext, ChunkOutput, ChunkRun
from workbench.architectures.dense import DenseAdapter
from workbench.architectures.gated_delta import GatedDeltaAdapter
from workbench.architectures.gemma3 import Gemma3Adapter
from workbench.architectures.latent_sparse import LatentSparseAdapter
from workbench.errors import UnsupportedModelError

__all__ = ["Adapter", "ChunkContext", "ChunkOutput", "ChunkRun", "adapter_for", "supported_model_types"]

_ADAPTERS: tuple[type[Adapter], ...] = (DenseAdapter, Gemma3Adapter, GatedDeltaAdapter, LatentSparseAdapter)


def supported_model_types() -> tuple[str, ...]:
    return tuple(name for adapter in _ADAPTERS for name in adapter.model_types)


def adapter_for(causal_lm: nn.Module) -> Adapter:
    """The adapter of a transformers causal LM, or UnsupportedModelError listing what is supported."""
    config: Any = getattr(causal_lm, "config", None)
    model_type = getattr(config, "model_type", None)
    for adapter in _ADAPTERS:
        if model_type in adapter.model_types and hasattr(causal_lm, "lm_head"):
            return adapter(causal_lm)
    raise UnsupportedModelError(
        f"{type(causal_lm).__name__} (model_type={model_type!r}) is not a supported causal language model. "
        f"Supported model types: {', '.join(supported_model_types())}, each as its text-only ...ForCausalLM class"
    )
