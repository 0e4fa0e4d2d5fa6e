"""How long a step takes: operations by phase over what the machine delivers.

Operations are exact from the configuration but for the recurrence (small) and an unbalanced routing; the rate is not:
the share of peak that kernels reach is between 35 and 70 % in published training runs [assumed], LongStraw measured
17 to 20 %, and this machine's own share comes from a calibration. Hence three lines per plan: roofline, 50 % of peak,
calibrated. One multiply-add is two operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.planner.graph import SUB_CHUNK
from workbench.planner.request import Request
from workbench.planner.shapes import Attention, GatedDelta, Latent, Layer, ModelShape
from workbench.planner.sizes import row_bytes_per_token, weight_bytes

HALF_OF_PEAK = 0.5
SECONDS_BAND = (0.71, 1.43)  # 70 % and 35 % of peak, relative to 50 %

# Backward of a linear in forwards: 1 for its input; 1 more for its weight when that is trained.
INPUT_GRADIENT, WEIGHT_GRADIENT = 1.0, 1.0
# Flash attention's backward: 5 products against the forward's 2; 3 of them where the rows take no gradient.
ATTENTION_BACKWARD = 2.5
QUERY_GRADIENT = 1.5


def pair_sum(first: int, last: int) -> int:
    """sum of q for q = first + 1 .. last: how many keys queries at positions first .. last - 1 see in all."""
    return last * (last + 1) // 2 - first * (first + 1) // 2


def dense_flops_per_token(shape: ModelShape) -> int:
    """2 per matrix element that a token meets, head left out; plus what the recurrence does for a token."""
    return sum(count * layer_flops_per_token(layer) for layer, count in shape.groups)


def layer_flops_per_token(layer: Layer) -> int:
    return 2 * layer.active_weights + recurrence_flops_per_token(layer)


def recurrence_flops_per_token(layer: Layer) -> int:
    """The scan of `ops/gated_delta.py` over sub-chunks of C tokens, and the short convolution before it.

    Per value head and token: 2 C k each for k k^T, q k^T; C (k + v) for the triangular solve; 2 k k and 2 k v to make a
    step; 2 k k v / C to take it; 2 k v each for reading the state with q and w; 2 C v for the products within C.
    Its backward is counted as two of these, like a product's; it is C (k + v) - 4 k k - 2 k k v / C different.
    """
    mixer = layer.mixer
    if not isinstance(mixer, GatedDelta):
        return 0
    k, v, c = mixer.key_dim, mixer.value_dim, SUB_CHUNK
    per_head = 4 * c * k + c * (k + v) + 2 * k * k + 2 * k * v + 2 * k * k * v // c + 4 * k * v + 2 * c * v
    return mixer.value_heads * per_head + 2 * mixer.channels * mixer.kernel


def state_flops_per_token(layer: Layer, *, queries: bool) -> int:
    """What a last layer does for a prompt token, whose output nobody needs: up to its rows and carry.

    queries: with the projections that make no state but that the stock module computes before it has one.
    """
    mixer = layer.mixer
    if isinstance(mixer, GatedDelta):
        return 2 * sum(linear.weights for linear in mixer.linears() if linear.source == "x") + (
            recurrence_flops_per_token(layer)
        )
    wanted = {"k_proj", "v_proj", "kv_a_proj_with_mqa", "wk"} | ({"q_proj", "q_a_proj", "wq_b"} if queries else set())
    return 2 * sum(linear.weights for linear in mixer.linears() if linear.name in wanted)


def prompt_flops_per_token(shape: ModelShape, *, queries: bool = True) -> int:
    """Forward of a prompt token: the last layer stops once its state is there (attention left out here)."""
    last = shape.layers[-1]
    return dense_flops_per_token(shape) - layer_flops_per_token(last) + state_flops_per_token(last, queries=queries)


def prompt_attention_flops(shape: ModelShape, first: int, last: int) -> int:
    """Forward attention of prompt tokens; the last layer has none."""
    return attention_flops(shape, first, last) - layer_attention_flops(shape.layers[-1], first, last)


def exact_gradient_flops(
    shape: ModelShape, *, prompt_tokens: int, response_tokens: int, group_size: int, through_prompt: bool = True
) -> int:
    """The least that a step can do: every token forward once, and backward (twice a forward) where a gradient goes.

    through_prompt=False: the prompt's part of the gradient is left out, so the prompt is only run forward.
    """
    resident = prompt_tokens - 1
    prompt = resident * prompt_flops_per_token(shape, queries=False) + prompt_attention_flops(shape, 0, resident)
    per_token = dense_flops_per_token(shape) + head_flops_per_token(shape)
    response = response_tokens * per_token + attention_flops(shape, resident, resident + response_tokens)
    return prompt * (3 if through_prompt else 1) + 3 * group_size * response


def head_flops_per_token(shape: ModelShape) -> int:
    return 2 * shape.vocab * shape.hidden


def layer_attention_flops(layer: Layer, first: int, last: int) -> int:
    """Scores and weighted sum of queries at positions first .. last - 1 over everything before them."""
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        keys = pair_sum(first, last)
        if mixer.window is not None:
            keys = _windowed(first, last, mixer.window)
        return 4 * mixer.query_width * keys
    if isinstance(mixer, Latent):
        selected = _windowed(first, last, mixer.index_topk)
        index = 2 * mixer.index_heads * mixer.index_dim * pair_sum(first, last) if mixer.computes_index else 0
        return 2 * mixer.heads * (mixer.row_width + mixer.latent_rank) * selected + index
    return 0


def _windowed(first: int, last: int, window: int) -> int:
    """Keys seen in all when each query sees at most `window`, itself included."""
    ramp = min(max(window, first), last)
    return pair_sum(first, ramp) + window * (last - ramp)


def attention_flops(shape: ModelShape, first: int, last: int) -> int:
    """Forward, all layers."""
    return sum(count * layer_attention_flops(layer, first, last) for layer, count in shape.groups)


@dataclass(frozen=True)
class Work:
    """What one phase does: operations over all ranks; weight bytes read and host-link bytes per rank.

    segments: chunks or blocks it runs, each of which costs a fixed time per layer besides.
    """

    flops: float
    segments: int
    weight_reads: float = 0.0
    link_bytes: float = 0.0


def work_by_phase(shape: ModelShape, request: Request) -> dict[str, Work]:
    """Capture, replay of the whole group, prompt gradient, optimizer.

    Old log-probs are the replayed policy's own, so nothing is scored apart.
    """
    return {
        "capture": _capture(shape, request),
        "replay": _replay(shape, request),
        "prompt_gradient": _prompt_gradient(shape, request),
    }


def _capture(shape: ModelShape, request: Request) -> Work:
    tokens = request.resident_tokens
    flops = tokens * prompt_flops_per_token(shape) + prompt_attention_flops(shape, 0, tokens)
    reads = request.num_chunks * weight_bytes(shape, request)
    staged = _staged_bytes(shape, request, tuple(range(request.num_chunks)), both_ways=False)
    return Work(flops, request.num_chunks, reads, staged)


def _backward_share(request: Request) -> float:
    """Dense backward in forwards; layer checkpoints add the forward that is done again."""
    again = 1.0 if request.rebuilds_layers else 0.0
    return again + INPUT_GRADIENT + (WEIGHT_GRADIENT if request.training == "full" else 0.0)


def _replay(shape: ModelShape, request: Request) -> Work:
    """Forward over all blocks, all but the last again with a graph, backward over all.

    The head runs twice, for the log-probs and, a few rows at a time, for their gradient.
    """
    tokens, first = request.response_tokens, request.resident_tokens
    again = 1.0 - 1.0 / request.num_blocks
    dense, head = tokens * dense_flops_per_token(shape), tokens * head_flops_per_token(shape)
    attention = attention_flops(shape, first, first + tokens)
    one = dense * (1.0 + again + _backward_share(request)) + attention * (1.0 + again + ATTENTION_BACKWARD)
    one += head * (2.0 + INPUT_GRADIENT + (WEIGHT_GRADIENT if request.training == "full" else 0.0))
    one -= (ATTENTION_BACKWARD - QUERY_GRADIENT) * _rows_without_gradient(shape, request)
    passes = request.group_size * (3 * request.num_blocks - 1)
    resident = row_bytes_per_token(shape, request.compute_bytes) * request.rank_tokens(first)
    link = passes * resident if request.placement == "host" else 0.0
    segments = request.group_size * request.num_blocks
    return Work(request.group_size * one, segments, passes * weight_bytes(shape, request), link)


def _pair_flops(layers: tuple[Layer, ...]) -> int:
    """Forward operations of one (query, key) pair in softmax attention without a window."""
    mixers = [layer.mixer for layer in layers]
    return sum(4 * m.query_width for m in mixers if isinstance(m, Attention) and m.window is None)


def _rows_without_gradient(shape: ModelShape, request: Request) -> int:
    """Attention of one response over prompt rows that the scope gives no gradient."""
    chunks = request.walked_chunks
    if len(chunks) == request.num_chunks:
        return 0
    walked = sum(request.chunk_length(index) for index in chunks)
    return request.response_tokens * (request.resident_tokens - walked) * _pair_flops(shape.layers)


def _walked_over_unwalked(shape: ModelShape, request: Request) -> int:
    """The same of the walked chunks over earlier chunks that are not walked; the last layer has no attention there."""
    walked, unwalked, pairs = set(request.walked_chunks), 0, 0
    if len(walked) in (0, request.num_chunks):
        return 0
    for index in range(request.num_chunks):
        if index in walked:
            pairs += request.chunk_length(index) * unwalked
        else:
            unwalked += request.chunk_length(index)
    return pairs * _pair_flops(shape.layers[:-1])


def _prompt_gradient(shape: ModelShape, request: Request) -> Work:
    """Each walked chunk forward again and backward, once for the whole group."""
    chunks = request.walked_chunks
    tokens = sum(request.chunk_length(index) for index in chunks)
    attention = sum(
        prompt_attention_flops(
            shape, index * request.chunk_tokens, index * request.chunk_tokens + request.chunk_length(index)
        )
        for index in (chunks if len(chunks) < request.num_chunks else ())
    )
    if len(chunks) == request.num_chunks:
        attention = prompt_attention_flops(shape, 0, request.resident_tokens)
    # queries of the last layer are computed on the way, forward only
    flops = tokens * prompt_flops_per_token(shape, queries=False) * (1.0 + _backward_share(request))
    again = 2.0 if request.rebuilds_layers else 1.0
    flops += again * tokens * (prompt_flops_per_token(shape) - prompt_flops_per_token(shape, queries=False))
    flops += attention * (1.0 + ATTENTION_BACKWARD)
    flops -= (ATTENTION_BACKWARD - QUERY_GRADIENT) * _walked_over_unwalked(shape, request)
    reads = 2 * len(chunks) * weight_bytes(shape, request)
    return Work(flops, len(chunks), reads, _staged_bytes(shape, request, chunks, both_ways=True))


def _staged_bytes(shape: ModelShape, request: Request, chunks: tuple[int, ...], *, both_ways: bool) -> float:
    """Bytes over the host link when rows live there: every chunk needs all rows before it.

    both_ways: float32 gradient pages come in and go out as well.
    """
    if request.placement != "host":
        return 0.0
    per_token = row_bytes_per_token(shape, request.compute_bytes)
    if both_ways:
        per_token += 2 * row_bytes_per_token(shape, 4)
    before = sum(index * request.chunk_tokens for index in chunks)
    return per_token * request.rank_tokens(before)


def optimizer_seconds(trained_bytes: float, bytes_per_second: float) -> float:
    """AdamW reads weight, gradient and both moments and writes all but the gradient: 7 passes over trained bytes."""
    return 7 * trained_bytes / bytes_per_second


@dataclass(frozen=True)
class Rate:
    """What a machine delivers in one phase. segment_seconds: fixed time of one layer in one segment (launches)."""

    flops_per_second: float
    segment_seconds: float = 0.0


def phase_seconds(work: Work, rate: Rate, ranks: int, num_layers: int, memory_rate: float, link_rate: float) -> float:
    """The slowest of computing, reading weights and the host link, which overlap. Dense work is shared by the ranks.

    memory_rate, link_rate: bytes per second.
    """
    computing = work.flops / (ranks * rate.flops_per_second) + work.segments * num_layers * rate.segment_seconds
    return max(computing, work.weight_reads / memory_rate, work.link_bytes / link_rate)
