"""What the planner knows of a model: widths and counts, and the sizes that follow from them alone.

Every figure here is exact. Counts are elements, not bytes: storage types come in where bytes are asked for. A layer is
a *mixer* (attention, Gated DeltaNet or latent attention) and a feed-forward part; each class says which matrices it
has, which rows it keeps per token and which carry it hands on, next to the widths these follow from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Linear:
    """One matrix product. source: names its input, so that inputs which several matrices share are kept once.

    adapted: the engine's default LoRA targets it (all linears but the sparse-attention indexer's).
    """

    name: str
    inputs: int
    outputs: int
    source: str
    bias: bool = False
    adapted: bool = True

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    def lora_params(self, rank: int) -> int:
        """A [rank, in] and B [out, rank]."""
        return rank * (self.inputs + self.outputs)


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped heads. window: tokens a query sees, itself included; None sees all."""

    hidden: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    window: int | None = None
    gated: bool = False
    qk_norm: bool = False
    bias: bool = False

    carry_fp32_elements = 0
    carry_elements = 0

    @property
    def kind(self) -> str:
        return "full_attention" if self.window is None else "sliding_attention"

    @property
    def query_width(self) -> int:
        return self.query_heads * self.head_dim

    @property
    def row_elements(self) -> int:
        """Keys and values of one token."""
        return 2 * self.key_value_heads * self.head_dim

    @property
    def gradient_elements(self) -> int:
        """Row elements that take a gradient."""
        return self.row_elements

    @property
    def row_limit(self) -> int | None:
        """Rows before a token that it can still see: the window less itself."""
        return None if self.window is None else self.window - 1

    def linears(self) -> tuple[Linear, ...]:
        key_value = self.key_value_heads * self.head_dim
        query = self.query_width * (2 if self.gated else 1)
        return (
            Linear("q_proj", self.hidden, query, "x", self.bias),
            Linear("k_proj", self.hidden, key_value, "x", self.bias),
            Linear("v_proj", self.hidden, key_value, "x", self.bias),
            Linear("o_proj", self.query_width, self.hidden, "attention", self.bias),
        )

    @property
    def other_params(self) -> int:
        return 2 * self.head_dim if self.qk_norm else 0


@dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet: a recurrent state instead of rows. fused_inputs: one matrix for q, k, v, z (Qwen3-Next)."""

    hidden: int
    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused_inputs: bool = False

    kind = "gated_delta"
    row_elements = 0
    gradient_elements = 0
    row_limit = None

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the causal convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def carry_fp32_elements(self) -> int:
        """The recurrent state, one key x value matrix per value head; float32 in every implementation."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def carry_elements(self) -> int:
        """The convolution's tail: kernel - 1 columns (transformers keeps kernel of them, this engine does not)."""
        return self.channels * (self.kernel - 1)

    def linears(self) -> tuple[Linear, ...]:
        inputs: tuple[Linear, ...]
        if self.fused_inputs:
            inputs = (
                Linear("in_proj_qkvz", self.hidden, self.channels + self.value_width, "x"),
                Linear("in_proj_ba", self.hidden, 2 * self.value_heads, "x"),
            )
        else:
            inputs = (
                Linear("in_proj_qkv", self.hidden, self.channels, "x"),
                Linear("in_proj_z", self.hidden, self.value_width, "x"),
                Linear("in_proj_b", self.hidden, self.value_heads, "x"),
                Linear("in_proj_a", self.hidden, self.value_heads, "x"),
            )
        return (*inputs, Linear("out_proj", self.value_width, self.hidden, "mixed"))

    @property
    def other_params(self) -> int:
        """Convolution, A_log and dt_bias per value head, the gated norm."""
        return self.channels * self.kernel + 2 * self.value_heads + self.value_dim


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention, absorbed, with sparse selection. computes_index: False shares an earlier layer's."""

    hidden: int
    heads: int
    query_rank: int
    latent_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    computes_index: bool
    bias: bool = False

    row_limit = None
    carry_fp32_elements = 0
    carry_elements = 0

    @property
    def kind(self) -> str:
        return "latent_indexed" if self.computes_index else "latent_shared"

    @property
    def row_width(self) -> int:
        """One token's latent with its rotary key: the single key head that also serves as value."""
        return self.latent_rank + self.rope_dim

    @property
    def row_elements(self) -> int:
        return self.row_width + (self.index_dim if self.computes_index else 0)

    @property
    def gradient_elements(self) -> int:
        """Index keys take no gradient."""
        return self.row_width

    def linears(self) -> tuple[Linear, ...]:
        per_head = self.nope_dim + self.rope_dim
        projections = (
            Linear("q_a_proj", self.hidden, self.query_rank, "x", self.bias),
            Linear("q_b_proj", self.query_rank, self.heads * per_head, "query_latent"),
            Linear("kv_a_proj_with_mqa", self.hidden, self.row_width, "x", self.bias),
            Linear("kv_b_proj", self.latent_rank, self.heads * (self.nope_dim + self.value_dim), "identity"),
            Linear("o_proj", self.heads * self.value_dim, self.hidden, "attention", self.bias),
        )
        if not self.computes_index:
            return projections
        indexer = (
            Linear("wq_b", self.query_rank, self.index_heads * self.index_dim, "query_latent", adapted=False),
            Linear("wk", self.hidden, self.index_dim, "x", adapted=False),
            Linear("weights_proj", self.hidden, self.index_heads, "x", adapted=False),
        )
        return projections + indexer

    @property
    def other_params(self) -> int:
        """Norms of both latents; the index keys' LayerNorm has weight and bias."""
        return self.query_rank + self.latent_rank + (2 * self.index_dim if self.computes_index else 0)


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU, dense or with routed experts. inner: width of the dense part or of the shared experts together."""

    hidden: int
    inner: int
    num_experts: int = 0
    active_experts: int = 0
    expert_inner: int = 0
    shared_gate: bool = False
    bias: bool = False

    @property
    def kind(self) -> str:
        return "moe" if self.num_experts else "dense"

    def linears(self) -> tuple[Linear, ...]:
        if not self.inner:
            return ()
        gate = (Linear("shared_expert_gate", self.hidden, 1, "ffn_x"),) if self.shared_gate else ()
        return (
            Linear("gate_proj", self.hidden, self.inner, "ffn_x", self.bias),
            Linear("up_proj", self.hidden, self.inner, "ffn_x", self.bias),
            Linear("down_proj", self.inner, self.hidden, "product", self.bias),
            *gate,
        )

    @property
    def expert_tensors(self) -> tuple[int, ...]:
        """Elements of the two stacked tensors of all experts (3-D parameters, no nn.Linear, in transformers 5)."""
        if not self.num_experts:
            return ()
        matrix = self.num_experts * self.expert_inner * self.hidden
        return 2 * matrix, matrix

    @property
    def other_params(self) -> int:
        """The router."""
        return self.num_experts * self.hidden


@dataclass(frozen=True)
class Layer:
    """One decoder layer; equal layers are equal objects.

    norms: RMS norms of width hidden. wide_norms: they multiply by (1 + weight) in float32, as Gemma's and Qwen3.5's do.
    """

    mixer: Attention | GatedDelta | Latent
    feed_forward: FeedForward
    norms: int = 2
    wide_norms: bool = False

    @property
    def kind(self) -> str:
        """What one measurement of saved bytes serves for: kind of mixer and of feed-forward."""
        return f"{self.mixer.kind}+{self.feed_forward.kind}"

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        return self.mixer.linears() + self.feed_forward.linears()

    @property
    def linear_weights(self) -> int:
        return sum(linear.weights for linear in self.linears)

    @property
    def other_params(self) -> int:
        biases = sum(linear.outputs for linear in self.linears if linear.bias)
        norms = self.norms * self.feed_forward.hidden
        return biases + norms + self.mixer.other_params + self.feed_forward.other_params

    @property
    def num_params(self) -> int:
        return self.linear_weights + self.other_params + sum(self.feed_forward.expert_tensors)

    def lora_params(self, rank: int) -> int:
        return sum(linear.lora_params(rank) for linear in self.linears if linear.adapted)

    @property
    def active_weights(self) -> int:
        """Matrix elements that one token meets: linears, the router and its own experts."""
        ffn = self.feed_forward
        return self.linear_weights + ffn.other_params + 3 * ffn.active_experts * ffn.expert_inner * ffn.hidden


@dataclass(frozen=True)
class ModelShape:
    """A text decoder. layers: in order. max_positions: the native limit of its configuration."""

    name: str
    model_type: str
    hidden: int
    vocab: int
    tied: bool
    max_positions: int
    layers: tuple[Layer, ...]

    @cached_property
    def groups(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers with their counts, in order of first appearance."""
        counts: dict[Layer, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return tuple(counts.items())

    def each(self) -> Iterator[tuple[Layer, int]]:
        return iter(self.groups)

    @property
    def embedding_params(self) -> int:
        """Embedding, head unless tied, final norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @cached_property
    def num_params(self) -> int:
        return self.embedding_params + sum(count * layer.num_params for layer, count in self.groups)

    @property
    def num_experts(self) -> int:
        return max(layer.feed_forward.num_experts for layer in self.layers)

    def lora_params(self, rank: int) -> int:
        """Trainable parameters of the engine's default LoRA: every decoder linear but indexers; no routed experts."""
        return sum(count * layer.lora_params(rank) for layer, count in self.groups)
