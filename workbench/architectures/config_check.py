"""Fail closed on configuration: every field is handled, ignored for a stated reason, or pinned to known values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from workbench.errors import UnsupportedModelError

# Fields every transformers config carries that cannot change the forward pass of a text-only causal LM in eval mode.
BASE_FIELDS = frozenset(PreTrainedConfig().to_dict()) | {
    "_name_or_path",
    "model_type",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "initializer_range",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "tie_word_embeddings",
    "quantization_config",
    "attn_implementation",
    "experts_implementation",
}

# Every family's decoder honours these.
DECODER_FIELDS = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "attention_bias",
    }
)

# Frequencies of these do not depend on the length seen so far, so a chunk rotates as the whole sequence would.
STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")


def check_config(
    config: PreTrainedConfig,
    handled: frozenset[str],
    ignored: Mapping[str, str],
    required: Mapping[str, tuple[Any, ...]],
) -> None:
    """Raise UnsupportedModelError listing every field that is unknown or whose value is not reproduced."""
    fields = config.to_dict()
    problems = [
        f"{name}={value!r} (unknown field)"
        for name, value in sorted(fields.items())
        if name not in BASE_FIELDS | handled | ignored.keys() | required.keys()
    ]
    problems += [
        f"{name}={fields[name]!r} (only {', '.join(map(repr, allowed))})"
        for name, allowed in required.items()
        if name in fields and fields[name] not in allowed
    ]
    problems += [
        f"rope_type={kind!r} (its frequencies depend on the length; only {', '.join(STATIC_ROPE)})"
        for kind in _rope_types(fields.get("rope_parameters"))
        if kind not in STATIC_ROPE
    ]
    if problems:
        raise UnsupportedModelError(
            f"{config.model_type} configuration is not handled: {'; '.join(problems)}. "
            "A field this adapter does not know may change the forward pass; add it to the adapter with a parity test"
        )


def _rope_types(rope: Any) -> list[str]:
    if not isinstance(rope, Mapping):
        return []
    if any(isinstance(value, Mapping) for value in rope.values()):
        return [kind for value in rope.values() for kind in _rope_types(value)]
    return [rope.get("rope_type", "default")]
