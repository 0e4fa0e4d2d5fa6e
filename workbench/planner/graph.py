"""What autograd keeps of one layer, in bytes per token: the part of a plan that an implementation decides.

Read off `torch.autograd.graph.saved_tensors_hooks` on the engine's own modules (torch 2.13, transformers 5.24, real
layer widths on the meta device), tensor by tensor; each function lists them. Without a calibration a plan takes these
as its middle and GRAPH_BAND around them; a calibration replaces them by slopes measured on the machine.

Notation: b bytes of an activation, c bytes of a linear's kept input. PEFT's adapters are float32, so on a bf16 model
every adapted linear keeps a float32 copy of its own input (c = 4); else linears of one input share it (c = b).
"""

from __future__ import annotations

from workbench.planner.request import FP32_BYTES, HEAD_ROWS, Request
from workbench.planner.shapes import Attention, FeedForward, GatedDelta, Latent, Layer, ModelShape

# From fully fused kernels to the eager torch fallbacks of transformers, relative to the formulas below.
GRAPH_BAND = (0.66, 1.67)

GATHER_BYTES = 64 * 2**20  # of selected rows that sparse attention gathers at a time (`ops/selected_attention.py`)
SUB_CHUNK = 64  # tokens of one step of the Gated DeltaNet scan
NORM_STATISTIC = FP32_BYTES  # 1 / rms per token
LOG_SUM_EXP = FP32_BYTES  # per query head

# Live copies of a logit in the head, forward and backward: the logit and its softmax.
HEAD_BYTES_PER_LOGIT = 8


def linear_input_bytes(layer: Layer, request: Request) -> int:
    """Inputs kept for weight gradients, and the adapters' inner activations A x (float32, rank per linear)."""
    lora, b = request.training == "lora", request.compute_bytes
    inputs: dict[str, int] = {}
    inner = 0
    for linear in layer.linears:
        if linear.source == "identity" or (lora and not linear.adapted):
            continue  # not a function of tokens, or frozen without an adapter
        own_copy = lora and b != FP32_BYTES
        key = linear.name if own_copy else linear.source
        inputs[key] = linear.inputs * (FP32_BYTES if own_copy else b)
        inner += request.lora_rank * FP32_BYTES if lora else 0
    return sum(inputs.values()) + inner


def trained_norm_bytes(width: int, request: Request, *, wide: bool) -> int:
    """The normalised values, kept for a trained norm weight: float32 where the product with the weight is."""
    return 0 if request.training != "full" else width * (FP32_BYTES if wide else request.compute_bytes)


def norm_bytes(width: int, request: Request, *, wide: bool = False) -> int:
    """RMS norm: its float32 input and statistic; with a trained weight the normalised values as well."""
    return width * FP32_BYTES + NORM_STATISTIC + trained_norm_bytes(width, request, wide=wide)


def attention_bytes(mixer: Attention, request: Request, *, wide_norms: bool) -> int:
    """q, output, k, v, log-sum-exp; what q/k norms keep; a gated output and its sigmoid."""
    b, width, key_value = request.compute_bytes, mixer.query_width, mixer.key_value_heads * mixer.head_dim
    total = 2 * width * b + 2 * key_value * b + mixer.query_heads * LOG_SUM_EXP
    if mixer.qk_norm:
        # In float32 the q that the norm keeps is a view of the projection's whole output, gate included.
        whole = 2 if mixer.gated and b == FP32_BYTES else 1
        trained = trained_norm_bytes(width + key_value, request, wide=wide_norms)
        statistics = (mixer.query_heads + mixer.key_value_heads) * NORM_STATISTIC
        total += whole * width * FP32_BYTES + key_value * FP32_BYTES + statistics + trained
    if mixer.gated:
        total += 2 * width * b
    return total


def scan_bytes(mixer: GatedDelta) -> int:
    """The scan of `ops/gated_delta.py`, float32 throughout.

    Per value head and token: 3 rows of the 64 x 64 sub-chunk matrices, query, key and state reader, value, new and
    corrected value, gates; per sub-chunk: the state before it (key x value).
    """
    per_token = 3 * SUB_CHUNK + 3 * mixer.key_dim + 3 * mixer.value_dim + 8
    per_sub_chunk = mixer.key_dim * mixer.value_dim
    return mixer.value_heads * FP32_BYTES * (per_token + per_sub_chunk // SUB_CHUNK)


def padding_bytes(layer: Layer, tokens: int) -> int:
    """The scan pads a segment to whole sub-chunks; what it saves of the padding."""
    return scan_bytes(layer.mixer) * (-tokens % SUB_CHUNK) if isinstance(layer.mixer, GatedDelta) else 0


def gated_delta_state_bytes(mixer: GatedDelta, request: Request) -> int:
    """What produces the state: the convolution's input and output, and the scan.

    The norms of q and k keep what the scan keeps, if key heads serve as many value heads; else their own results.
    """
    normed = 2 * mixer.key_heads * mixer.key_dim if mixer.key_heads != mixer.value_heads else 0
    statistics = 2 * mixer.key_heads * NORM_STATISTIC
    return 2 * mixer.channels * request.compute_bytes + normed * FP32_BYTES + statistics + scan_bytes(mixer)


def gated_delta_output_bytes(mixer: GatedDelta, request: Request) -> int:
    """The gated norm: float32 input, gate and its activation, one in the model's dtype (one more if trained)."""
    trained = mixer.value_width * request.compute_bytes if request.training == "full" else 0
    return mixer.value_width * (3 * FP32_BYTES + request.compute_bytes) + trained


def latent_bytes(mixer: Latent, request: Request) -> int:
    """Absorbed q and output in latent width, q before absorption, one row, selected positions, both latents' norms."""
    b = request.compute_bytes
    selection = FP32_BYTES * mixer.index_topk if mixer.computes_index else 0  # int32 positions
    absorbed = 2 * mixer.heads * mixer.row_width * b
    plain = mixer.heads * b * (mixer.nope_dim + (mixer.rope_dim if b == FP32_BYTES else 0))
    norms = norm_bytes(mixer.query_rank, request) + norm_bytes(mixer.latent_rank, request)
    return absorbed + plain + selection + mixer.row_width * b + norms + mixer.heads * LOG_SUM_EXP


def expert_bytes(ffn: FeedForward, request: Request) -> int:
    """Routed experts: for each active one its input and gate, activation and up; the router's scores.

    Experts are frozen parameters under LoRA: they keep no input for a weight gradient.
    """
    if not ffn.num_experts:
        return 0
    kept = ffn.hidden + 3 * ffn.expert_inner
    kept += ffn.hidden + ffn.expert_inner if request.training == "full" else 0
    return ffn.active_experts * kept * request.compute_bytes + ffn.num_experts * FP32_BYTES


def feed_forward_bytes(ffn: FeedForward, request: Request) -> int:
    """gate, its activation and up of the dense part, the gated output of shared experts, and the routed ones."""
    b = request.compute_bytes
    dense = 3 * ffn.inner * b + (ffn.hidden * b if ffn.shared_gate else 0)
    return dense + expert_bytes(ffn, request)


def attention_workspace_bytes(layer: Layer, request: Request, tokens: int) -> int:
    """What attention holds beside the layer's own temporaries, for a segment of `tokens`.

    Latent: gathered rows with a float32 copy and their gradient, up to GATHER_BYTES of rows at a time, and the index
    scores of one page (float32, per index head, before and after the ReLU). Sliding: one page's additive mask and the
    booleans it came from. Both are made page by page and never kept.
    """
    mixer, b = layer.mixer, request.compute_bytes
    page = min(request.chunk_tokens, request.positions)
    if isinstance(mixer, Latent):
        rows = min(GATHER_BYTES, tokens * min(mixer.index_topk, request.positions) * mixer.row_width * b)
        scores = 2 * tokens * page * mixer.index_heads * FP32_BYTES if mixer.computes_index else 0
        return max(rows * (b + 2 * FP32_BYTES) // b, scores)
    if isinstance(mixer, Attention) and mixer.window is not None:
        return tokens * page * (b + 1)
    return 0


def saved_bytes_per_token(layer: Layer, request: Request) -> int:
    """Everything one layer keeps for its backward, per token."""
    ffn, mixer = layer.feed_forward, layer.mixer
    total = layer.norms * norm_bytes(ffn.hidden, request, wide=layer.wide_norms) + linear_input_bytes(layer, request)
    total += feed_forward_bytes(ffn, request)
    if isinstance(mixer, Attention):
        return total + attention_bytes(mixer, request, wide_norms=layer.wide_norms)
    if isinstance(mixer, GatedDelta):
        return total + gated_delta_state_bytes(mixer, request) + gated_delta_output_bytes(mixer, request)
    return total + latent_bytes(mixer, request)


def state_only_bytes_per_token(layer: Layer, request: Request) -> int:
    """What the last layer keeps in the prompt walk, where it stops once its rows and carry are there."""
    mixer, b = layer.mixer, request.compute_bytes
    total = norm_bytes(layer.feed_forward.hidden, request) + layer.feed_forward.hidden * b
    if isinstance(mixer, GatedDelta):
        return total + gated_delta_state_bytes(mixer, request)
    key_norm = isinstance(mixer, Attention) and mixer.qk_norm
    return total + mixer.row_elements * b + (mixer.row_elements // 2 * FP32_BYTES if key_norm else 0)


def kept_per_segment_bytes(layer: Layer, request: Request) -> int:
    """What does not grow with the tokens: latent attention's up-projections, read out as [latent_rank, outputs]."""
    if not isinstance(layer.mixer, Latent):
        return 0
    mixer = layer.mixer
    return mixer.latent_rank * mixer.heads * (mixer.nope_dim + mixer.value_dim) * request.compute_bytes


def kept_between_layers_bytes(layer: Layer, request: Request) -> int:
    """With layer checkpoints: a layer's input, and its attention output with log-sum-exp (attention runs once)."""
    mixer, kept = layer.mixer, layer.feed_forward.hidden * request.compute_bytes
    if isinstance(mixer, Attention):
        kept += mixer.query_width * request.compute_bytes + mixer.query_heads * LOG_SUM_EXP
    elif isinstance(mixer, Latent):
        kept += mixer.heads * (mixer.row_width * request.compute_bytes + LOG_SUM_EXP)
    return kept


def head_logits_bytes(shape: ModelShape, request: Request) -> int:
    """The head works through HEAD_ROWS rows at a time: no response x vocabulary tensor exists."""
    return min(HEAD_ROWS, request.response_tokens) * shape.vocab * HEAD_BYTES_PER_LOGIT


def largest_weight_gradient_bytes(shape: ModelShape, request: Request) -> int:
    """Autograd's temporary for the largest trained matrix of a layer, before it is added to `.grad`."""
    if request.training == "lora":
        return max(linear.lora_params(request.lora_rank) for layer, _ in shape.groups for linear in layer.linears) * 4
    tensors = [linear.weights for layer, _ in shape.groups for linear in layer.linears]
    tensors += [tensor for layer, _ in shape.groups for tensor in layer.feed_forward.expert_tensors]
    return max(tensors) * request.trained_bytes
