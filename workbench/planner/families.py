"""From a Hugging Face configuration to a `ModelShape`: one small reader per family, clear errors for what is absent.

Reads configurations only; nothing is downloaded or instantiated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.errors import InvalidInputError, UnsupportedModelError
from workbench.planner.shapes import Attention, FeedForward, GatedDelta, Latent, Layer, ModelShape

_MISSING = object()


class Fields:
    """The fields of one configuration; a missing one is named together with the family that needs it."""

    def __init__(self, config: Any, name: str) -> None:
        self._config, self.name = config, name
        self.model_type = str(getattr(config, "model_type", None))

    def __call__(self, field: str, default: Any = _MISSING) -> Any:
        value = getattr(self._config, field, None)
        if value is not None:
            return value
        if default is _MISSING:
            raise InvalidInputError(
                f"the configuration of {self.name} (model_type={self.model_type!r}) has no field {field!r}, "
                "which the plan needs; take the model's own config.json, or add the field"
            )
        return default


def model_shape(config: Any, name: str) -> ModelShape:
    """The shape that a transformers configuration (or anything with its attributes) describes.

    A multimodal configuration is read for its text part: vision towers are not part of a plan.
    Raises InvalidInputError for a missing field, UnsupportedModelError for another family.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else getattr(config, "text_config", config)
    fields = Fields(text, name)
    reader = _READERS.get(fields.model_type)
    if reader is None:
        raise UnsupportedModelError(
            f"{name}: model_type={fields.model_type!r} is not a supported family; supported: {', '.join(_READERS)}"
        )
    return ModelShape(
        name=name,
        model_type=fields.model_type,
        hidden=fields("hidden_size"),
        vocab=fields("vocab_size"),
        tied=bool(fields("tie_word_embeddings", False)),
        max_positions=fields("max_position_embeddings"),
        layers=tuple(reader(fields, index) for index in range(fields("num_hidden_layers"))),
    )


def check_raw_fields(raw: Mapping[str, Any], name: str) -> None:
    """Name a field that a config.json must state itself: transformers would fill it in with another model's value."""
    model_type = raw.get("model_type")
    for field in _REQUIRED + _REQUIRED_OF.get(str(model_type), ()):
        if raw.get(field) is None:
            raise InvalidInputError(
                f"the configuration of {name} (model_type={model_type!r}) has no field {field!r}; transformers would "
                "silently use its default for the family's first model"
            )


_REQUIRED: tuple[str, ...] = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_GATED_DELTA_FIELDS = (
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "head_dim",
)
_EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_LATENT_FIELDS = (
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
)
_REQUIRED_OF: dict[str, tuple[str, ...]] = {
    "llama": ("intermediate_size",),
    "qwen3": ("intermediate_size", "head_dim"),
    "gemma3_text": ("intermediate_size", "head_dim", "sliding_window"),
    "qwen3_next": (*_GATED_DELTA_FIELDS, *_EXPERT_FIELDS),
    "qwen3_5_text": ("intermediate_size", *_GATED_DELTA_FIELDS),
    "qwen3_5_moe_text": (*_GATED_DELTA_FIELDS, *_EXPERT_FIELDS),
    "glm_moe_dsa": _LATENT_FIELDS,
    "deepseek_v32": _LATENT_FIELDS,
}


def _attention(fields: Fields, **options: Any) -> Attention:
    heads = fields("num_attention_heads")
    return Attention(
        hidden=fields("hidden_size"),
        query_heads=heads,
        key_value_heads=fields("num_key_value_heads"),
        head_dim=fields("head_dim", fields("hidden_size") // heads),
        bias=bool(fields("attention_bias", False)),
        **options,
    )


def _dense(fields: Fields, **options: Any) -> FeedForward:
    return FeedForward(fields("hidden_size"), fields("intermediate_size"), **options)


def _llama(fields: Fields, index: int) -> Layer:
    return Layer(_attention(fields), _dense(fields, bias=bool(fields("mlp_bias", False))))


def _qwen3(fields: Fields, index: int) -> Layer:
    return Layer(_attention(fields, qk_norm=True), _dense(fields))


def _gemma3(fields: Fields, index: int) -> Layer:
    sliding = fields("layer_types")[index] == "sliding_attention"
    window = fields("sliding_window") if sliding else None
    return Layer(_attention(fields, qk_norm=True, window=window), _dense(fields), norms=4, wide_norms=True)


def _gated_delta(fields: Fields, index: int) -> Layer:
    mixer: Attention | GatedDelta
    if fields("layer_types")[index] == "full_attention":
        mixer = _attention(fields, qk_norm=True, gated=True)
    else:
        mixer = GatedDelta(
            hidden=fields("hidden_size"),
            value_heads=fields("linear_num_value_heads"),
            key_heads=fields("linear_num_key_heads"),
            key_dim=fields("linear_key_head_dim"),
            value_dim=fields("linear_value_head_dim"),
            kernel=fields("linear_conv_kernel_dim"),
            fused_inputs=fields.model_type == "qwen3_next",
        )
    return Layer(mixer, _gated_delta_feed_forward(fields, index), wide_norms=True)


def _gated_delta_feed_forward(fields: Fields, index: int) -> FeedForward:
    experts = fields("num_experts", 0) if fields.model_type != "qwen3_5_text" else 0
    sparse = (index + 1) % fields("decoder_sparse_step", 1) == 0 and index not in fields("mlp_only_layers", ())
    if not experts or not sparse:
        return _dense(fields)
    return FeedForward(
        hidden=fields("hidden_size"),
        inner=fields("shared_expert_intermediate_size"),
        num_experts=experts,
        active_experts=fields("num_experts_per_tok"),
        expert_inner=fields("moe_intermediate_size"),
        shared_gate=True,
    )


def _latent(fields: Fields, index: int) -> Layer:
    types = fields("indexer_types", None)
    mixer = Latent(
        hidden=fields("hidden_size"),
        heads=fields("num_attention_heads"),
        query_rank=fields("q_lora_rank"),
        latent_rank=fields("kv_lora_rank"),
        rope_dim=fields("qk_rope_head_dim"),
        nope_dim=fields("qk_nope_head_dim"),
        value_dim=fields("v_head_dim"),
        index_heads=fields("index_n_heads"),
        index_dim=fields("index_head_dim"),
        index_topk=fields("index_topk"),
        computes_index=types is None or types[index] == "full",
        bias=bool(fields("attention_bias", False)),
    )
    if fields("mlp_layer_types")[index] == "dense":
        return Layer(mixer, _dense(fields))
    expert_inner = fields("moe_intermediate_size")
    experts = FeedForward(
        hidden=fields("hidden_size"),
        inner=expert_inner * fields("n_shared_experts", 1),
        num_experts=fields("n_routed_experts"),
        active_experts=fields("num_experts_per_tok"),
        expert_inner=expert_inner,
    )
    return Layer(mixer, experts)


_READERS: dict[str, Callable[[Fields, int], Layer]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
    "qwen3_next": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "glm_moe_dsa": _latent,
    "deepseek_v32": _latent,
}
