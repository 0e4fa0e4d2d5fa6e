"""Sizes of what a step holds, in bytes per rank: one small function per quantity, each with its derivation.

All are exact from the configuration, up to the allocator's rounding (512 bytes per tensor, below 0.1 %). What depends
on an implementation (saved activations, workspace) is in `graph.py`. Golden values: tests/test_planner_vectors.py.
"""

from __future__ import annotations

from workbench.planner.request import FP32_BYTES, WEIGHT_BYTES, Request
from workbench.planner.shapes import GatedDelta, Layer, ModelShape

NF4_BLOCK = 64  # weights that share one absmax
NF4_NESTED_BLOCK = 256  # absmax values that share one float32 scale ("double quantisation")


def nf4_bytes(weights: int) -> int:
    """One tensor in NF4 with double quantisation, as bitsandbytes stores it.

    weights / 2 of 4-bit codes + one byte of absmax per 64 weights + one float32 per 256 absmax + one float32 offset:
    4.127 bits per weight. Source: QLoRA, arXiv 2305.14314, section 3.
    """
    blocks = -(-weights // NF4_BLOCK)
    return -(-weights // 2) + blocks + FP32_BYTES * -(-blocks // NF4_NESTED_BLOCK) + FP32_BYTES


def layer_weight_bytes(layer: Layer, request: Request) -> int:
    """One layer: its linears, its share of the experts, and norms, convolution and router unquantised."""
    element = WEIGHT_BYTES[request.weights]
    ep, ffn = request.expert_parallel, layer.feed_forward
    experts = [-(-ffn.num_experts // ep) * (tensor // ffn.num_experts) for tensor in ffn.expert_tensors]
    rest = layer.other_params * element
    if request.weights != "nf4":
        return rest + element * (layer.linear_weights + sum(experts))
    linears = sum(nf4_bytes(linear.weights) for linear in layer.linears)
    return rest + linears + sum(nf4_bytes(e) if request.quantize_experts else e * element for e in experts)


def weight_bytes(shape: ModelShape, request: Request) -> int:
    """The base model on one rank; embedding and head are never quantised. Context parallelism replicates weights."""
    layers = sum(count * layer_weight_bytes(layer, request) for layer, count in shape.groups)
    return layers + shape.embedding_params * WEIGHT_BYTES[request.weights]


def trained_params(shape: ModelShape, request: Request) -> int:
    """Parameters with a gradient on one rank."""
    if request.training == "lora":
        return shape.lora_params(request.lora_rank)
    total = shape.num_params
    for layer, count in shape.groups:
        ffn = layer.feed_forward
        if ffn.num_experts:
            elsewhere = ffn.num_experts - -(-ffn.num_experts // request.expert_parallel)
            total -= count * elsewhere * (sum(ffn.expert_tensors) // ffn.num_experts)
    return total


def adapter_bytes(shape: ModelShape, request: Request) -> int:
    """LoRA matrices A and B, float32."""
    return trained_params(shape, request) * request.trained_bytes if request.training == "lora" else 0


def gradient_bytes(shape: ModelShape, request: Request) -> int:
    """Gradients of the trained parameters, in their own dtype."""
    return trained_params(shape, request) * request.trained_bytes


def optimizer_bytes(shape: ModelShape, request: Request) -> int:
    """AdamW's two moments, in the parameters' dtype; allocated by the first optimizer call."""
    return 2 * gradient_bytes(shape, request) if request.optimizer == "adamw" else 0


def row_bytes_per_token(shape: ModelShape, element_bytes: int, *, windowed: bool = False) -> int:
    """Rows of one token in every layer that keeps all of them (windowed: also in layers that keep a window's worth).

    Attention: 2 x key/value heads x head_dim; latent attention: latent + rotary key (+ index key); Gated DeltaNet: 0.
    """
    return element_bytes * sum(
        count * layer.mixer.row_elements for layer, count in shape.groups if windowed or layer.mixer.row_limit is None
    )


def kept_rows(layer: Layer, request: Request) -> int:
    """Rows of one layer that one rank keeps at `positions` tokens.

    A sliding window caps them: to the window in all when nothing walks back, to the window per chunk when chunks are
    recomputed, because each chunk then needs the rows that it saw.
    """
    limit = layer.mixer.row_limit
    if limit is None or layer.mixer.row_elements == 0:
        return request.rank_tokens(request.positions)
    if not request.keeps_boundaries:
        return -(-min(request.positions, limit) // request.context_parallel)
    whole, rest = divmod(request.positions, request.chunk_tokens)
    kept = whole * min(request.chunk_tokens, limit) + min(rest, limit)
    return -(-kept // request.context_parallel)


def rows_bytes(shape: ModelShape, request: Request) -> int:
    """Rows of prompt plus one response: the prompt once, whatever the group's size."""
    element = request.compute_bytes
    return sum(count * layer.mixer.row_elements * element * kept_rows(layer, request) for layer, count in shape.groups)


def largest_layer_rows_bytes(shape: ModelShape, request: Request) -> int:
    """Rows of the one layer that is staged on the device when rows live on the host."""
    element = request.compute_bytes
    return max(layer.mixer.row_elements * element * kept_rows(layer, request) for layer, _ in shape.groups)


def carry_bytes(shape: ModelShape, element_bytes: int) -> int:
    """One carry of all layers: recurrent states in float32, convolution tails in the model's dtype."""
    return sum(
        count * (layer.mixer.carry_fp32_elements * FP32_BYTES + layer.mixer.carry_elements * element_bytes)
        for layer, count in shape.groups
    )


def rank_carry_bytes(shape: ModelShape, request: Request) -> int:
    """One carry on the rank that has most of it.

    Recurrent states are split by value heads over the context ranks, the first rank having the fewest where they do not
    divide. Convolution tails, with which the next chunk begins, are the first rank's alone.
    """
    first = others = 0
    for layer, count in shape.groups:
        if isinstance(layer.mixer, GatedDelta):
            heads, ranks = layer.mixer.value_heads, request.context_parallel
            head = count * layer.mixer.carry_fp32_elements // heads * FP32_BYTES
            first += heads // ranks * head + count * layer.mixer.carry_elements * request.compute_bytes
            others += -(-heads // ranks) * head
    return max(first, others)


def boundary_carries_bytes(shape: ModelShape, request: Request) -> int:
    """A carry at the end of every prompt chunk, for scopes that walk back."""
    return request.num_chunks * rank_carry_bytes(shape, request) if request.keeps_boundaries else 0


def gradient_page_tokens(request: Request) -> int:
    """Tokens whose rows hold a gradient page at once, over all ranks: the walked chunks, and a response's blocks.

    The walk to position 0 counts every position (prompt plus one response), which is over by the last block, that has
    a graph instead of pages. Without a walk, only the blocks before a response's last one have pages.
    """
    walked, response = request.walked_chunks, request.response_tokens
    if len(walked) == request.num_chunks and request.keeps_boundaries:
        return request.positions
    if not walked:
        return response - (response - 1) % request.block_tokens - 1 if request.num_blocks > 1 else 0
    return sum(request.chunk_length(index) for index in walked) + response


def gradient_pages_bytes(shape: ModelShape, request: Request) -> int:
    """float32 gradients of rows. A window's pages are touched, and consumed, only around the chunk being walked."""
    tokens = request.rank_tokens(gradient_page_tokens(request))
    total = 0
    for layer, count in shape.groups:
        limit = layer.mixer.row_limit
        rows = tokens
        if limit is not None and limit < gradient_page_tokens(request):
            page = min(request.chunk_tokens, limit)
            pages = -(-limit // request.chunk_tokens) + 1
            rows = min(tokens, -(-pages * page // request.context_parallel))
        total += count * layer.mixer.gradient_elements * FP32_BYTES * rows
    return total


def logits_bytes(rows: int, vocab: int, bytes_per_element: int) -> int:
    """Rows x vocabulary x bytes of every live copy per element."""
    return rows * vocab * bytes_per_element


def layer_inputs_bytes(shape: ModelShape, tokens: int, element_bytes: int) -> int:
    """Layer checkpoints of ordinary training: the input of every layer."""
    return tokens * len(shape.layers) * shape.hidden * element_bytes
