"""The gated delta rule over a chunk, with a backward that is linear in the chunk's length.

Same signature, shapes and values as transformers' `torch_chunk_gated_delta_rule`. The twin, which goes token by token,
is `chunk_gated_delta_rule_reference`. Two rules serve, chosen by capability (`rule_of`):

- "fla": flash-linear-attention's Triton kernels, where that package is installed, in half precision on CUDA. Written
  from its signature; not run on a GPU yet (tests/gpu/check_gated_delta.py).
- "products": this module's, everywhere else, as one autograd function over sub-chunks of SUB_CHUNK tokens.

The products' scan is affine in the state. With keys weighted to the end of their sub-chunk K, state readers W and new
values U (the UT transform), corrected values R_i = U_i - W_i S_i:

    S_{i+1} = decay_i S_i + K_i^T R_i = A_i S_i + B_i,    A_i = decay_i I - K_i^T W_i,    B_i = K_i^T U_i
    backward:  G_i = base_i + A_i^T G_{i+1}

so that the loop holds one product per sub-chunk in either direction, and everything else is batched products.

Decays span hundreds of orders of magnitude, and arithmetic that underflows is slow: exp of an argument whose result is
subnormal takes 60 to 150 times as long on an AVX-512 core. Logarithms of decays are therefore cut at `_least`, far
below what rounding can see beside the sub-chunk's own tokens, whose decay is 1.

Accumulates in float32 (float64 for float64 inputs). Source: Gated Delta Networks, arXiv 2412.06464.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from workbench.types import accumulation_dtype

SUB_CHUNK = 64
FLA, PRODUCTS = "fla", "products"

Rule = Callable[..., tuple[Tensor, Tensor | None]]


def rule_of(query: Tensor) -> str:
    """Which rule serves this query: fla's kernels refuse float32."""
    fits = query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)
    return FLA if fits and find_spec("fla") is not None else PRODUCTS


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, T, Hv, Dv] in query's dtype and the final state [B, Hv, Dk, Dv] in the accumulation dtype.

    query, key: [B, T, Hk, Dk]; value: [B, T, Hv, Dv], Hv a multiple of Hk; g (log decay <= 0), beta: [B, T, Hv].
    initial_state: [B or 1, Hv, Dk, Dv] or None for zeros. Queries are scaled by Dk ** -0.5.
    """
    if initial_state is not None:
        initial_state = initial_state.expand(query.shape[0], -1, -1, -1)
    rule = _rule_by_fla if rule_of(query) == FLA else _rule_by_products
    out, final = rule(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel)
    return out, final if output_final_state else None


def chunk_gated_delta_rule_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The slow twin: token by token, S <- decay S + k (beta (v - k^T decay S))^T, under plain autograd."""
    batch, tokens, heads, width = value.shape
    groups, dtype = heads // key.shape[2], accumulation_dtype(query.dtype)
    keys, queries = (x.repeat_interleave(groups, dim=2).to(dtype) for x in (key, query))
    if use_qk_l2norm_in_kernel:
        queries, keys = _l2norm(queries), _l2norm(keys)
    state = torch.zeros(batch, heads, keys.shape[-1], width, dtype=dtype, device=value.device)
    state = state if initial_state is None else state + initial_state
    outputs = []
    for t in range(tokens):
        state = state * g[:, t].to(dtype).exp()[..., None, None]
        read = torch.einsum("bhk,bhkv->bhv", keys[:, t], state)
        new = (value[:, t].to(dtype) - read) * beta[:, t].to(dtype)[..., None]
        state = state + torch.einsum("bhk,bhv->bhkv", keys[:, t], new)
        outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, t], state) * keys.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(query.dtype), state if output_final_state else None


def _rule_by_fla(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, normalise: bool
) -> tuple[Tensor, Tensor]:
    """flash-linear-attention's own rule: the same layout and conventions; log decays and states in float32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fused

    return fused(
        q=_for_each_value_head(query, value),
        k=_for_each_value_head(key, value),
        v=value,
        g=g.float(),
        beta=beta.to(query.dtype),
        scale=query.shape[-1] ** -0.5,
        initial_state=None if initial is None else initial.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalise,
    )


def _rule_by_products(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, normalise: bool
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = value.shape
    given, dtype = query.dtype, accumulation_dtype(query.dtype)
    if initial is None:
        initial = value.new_zeros(batch, heads, key.shape[-1], value.shape[-1], dtype=dtype)
    # padding has beta 0 and decay 1, so it changes nothing
    padding = -tokens % SUB_CHUNK

    def in_sub_chunks(x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [B * H, N, C, ...]"""
        x = x.to(dtype).transpose(1, 2).flatten(0, 1).contiguous()  # a view would keep the layer's whole projection
        if padding:
            x = F.pad(x, (0,) * (2 * x.dim() - 3) + (padding,))
        return x.unflatten(1, (-1, SUB_CHUNK))

    def directions(x: Tensor, scale: float) -> Tensor:
        """Queries or keys in sub-chunks, normalised if asked and scaled, one head for each value head."""
        x = in_sub_chunks(x)
        x = _Normalised.apply(x, scale) if normalise else x * scale
        return x if x.shape[0] == batch * heads else x.repeat_interleave(batch * heads // x.shape[0], dim=0)

    rows = directions(query, query.shape[-1] ** -0.5), directions(key, 1.0), *map(in_sub_chunks, (value, g, beta))
    out, final = _SubChunks.apply(*rows, initial.to(dtype).flatten(0, 1))
    out = out.flatten(1, 2)[:, :tokens].unflatten(0, (batch, heads)).transpose(1, 2).to(given)
    return out, final.unflatten(0, (batch, heads))


class _Normalised(torch.autograd.Function):
    """x / |x| * scale over the last axis. Keeps its result, as the rule does anyway, where autograd would keep x."""

    @staticmethod
    def forward(ctx, x, scale):  # type: ignore[override]
        factor = _inverse_norm(x).mul_(scale)
        out = x * factor
        ctx.save_for_backward(out, factor)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):  # type: ignore[override]
        out, factor = ctx.saved_tensors
        along = (out * dout).sum(dim=-1, keepdim=True).div_(ctx.scale**2)
        return (dout - out * along).mul_(factor), None


class _SubChunks(torch.autograd.Function):
    """Outputs [S, N, C, Dv] and final state [S, Dk, Dv] of S sequences (batch x heads) of N sub-chunks of C tokens.

    query, key: [S, N, C, Dk]; value: [S, N, C, Dv]; log_decay, beta: [S, N, C]; initial: [S, Dk, Dv].
    In the code: Z = S * N sub-chunks side by side; d<x> is the gradient of <x>.
    """

    @staticmethod
    def forward(ctx, query, key, value, log_decay, beta, initial):  # type: ignore[override]
        sequences = query.shape[0]
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        log_decay, beta = log_decay.flatten(0, 1).cumsum(dim=-1), beta.flatten(0, 1)
        pairwise = _factors(log_decay[:, :, None] - log_decay[:, None, :]).tril_()
        from_start, to_end, whole = _weights(log_decay)
        key_beta = key * beta[..., None]
        system = torch.bmm(key_beta, key.mT).mul_(pairwise).tril_(-1)
        attention = torch.bmm(query, key.mT).mul_(pairwise)
        solved = _solve(system, torch.cat([value * beta[..., None], key_beta * from_start], dim=-1), adjoint=False)
        update, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
        key_out = key * to_end
        steps = _steps(key_out, read, whole)
        before, final = _scan(steps, torch.bmm(key_out.mT, update), initial, sequences)
        corrected = torch.baddbmm(update, read, before, alpha=-1)
        out = torch.bmm(query * from_start, before).baddbmm_(attention, corrected)
        ctx.save_for_backward(
            query, key, value, log_decay, beta, pairwise, system, attention, solved, corrected, before
        )  # fmt: skip
        ctx.sequences = sequences
        return out.unflatten(0, (sequences, -1)), final

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal):  # type: ignore[override]
        query, key, value, log_decay, beta, pairwise, system, attention, solved, corrected, before = ctx.saved_tensors
        from_start, to_end, whole = _weights(log_decay)
        read, key_out = solved[..., value.shape[-1] :], key * to_end
        dout = dout.flatten(0, 1)
        # the states, from last to first: after[i] is the gradient of the state after sub-chunk i
        dcorrected = torch.bmm(attention.mT, dout)
        base = torch.bmm((query * from_start).mT, dout).baddbmm_(read.mT, dcorrected, alpha=-1)
        after, dinitial = _scan(_steps(key_out, read, whole).mT, base, dfinal, ctx.sequences, backward=True)
        dcorrected.baddbmm_(key_out, after)
        dread = torch.bmm(dcorrected, before.mT).neg_()
        dkey_out = torch.bmm(corrected, after.mT)
        dwhole = (after * before).sum(dim=(1, 2))
        # the triangular system
        dright = _solve(system, torch.cat([dcorrected, dread], dim=-1), adjoint=True)
        dsystem = torch.bmm(dright, solved.mT).neg_().tril_(-1)
        dvalue_beta, dread_in = dright.split([value.shape[-1], key.shape[-1]], dim=-1)
        dattention = torch.bmm(dout, corrected.mT)
        dpairwise_log = (dsystem * system).addcmul_(dattention, attention)
        dsystem.mul_(pairwise)
        dattention.mul_(pairwise)
        # rows
        key_beta = key * beta[..., None]
        dquery_in = torch.bmm(dout, before.mT).mul_(from_start)
        dkey_beta = torch.baddbmm(dread_in * from_start, dsystem, key)
        dkey = torch.bmm(dsystem.mT, key_beta).baddbmm_(dattention.mT, query)
        dkey.addcmul_(dkey_out, to_end).addcmul_(dkey_beta, beta[..., None])
        dbeta = (dvalue_beta * value).sum(dim=-1) + (dkey_beta * key).sum(dim=-1)
        # a token's log decay is part of every span that crosses it: pairs, ends, starts, whole. Summed span by span:
        # differences of running sums would cancel, and leave rounding where the gradient is 0
        dstart = (dquery_in * query).sum(dim=-1) + (dread_in * key_beta).sum(dim=-1) * from_start[..., 0]
        dlog = dstart.flip(-1).cumsum(dim=-1).flip(-1) + (dwhole * whole[:, 0, 0])[:, None]
        pairs = dpairwise_log.cumsum_(dim=2).tril_(-1).sum(dim=1)  # at j: pairs from j or before to behind j
        dlog[:, 1:] += (pairs + (dkey_out * key_out).sum(dim=-1).cumsum(dim=-1))[:, :-1]
        dquery = dquery_in.baddbmm_(dattention, key)
        dvalue = dvalue_beta * beta[..., None]
        return *(x.unflatten(0, (ctx.sequences, -1)) for x in (dquery, dkey, dvalue, dlog, dbeta)), dinitial


def _factors(logarithms: Tensor) -> Tensor:
    """exp of logarithms of decays, in place, without results so small that arithmetic with them is slow."""
    return logarithms.clamp_(_least(logarithms.dtype), 0.0).exp_()


def _least(dtype: torch.dtype) -> float:
    """-61 in float32, -495 in float64."""
    return 0.7 * math.log(torch.finfo(dtype).tiny)


def _weights(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decays from the start to each token and from it to the end [Z, C, 1], and over the whole sub-chunk [Z, 1, 1]."""
    total = log_decay[:, -1:]
    from_start, to_end, whole = (_factors(x.clone())[..., None] for x in (log_decay, total - log_decay, total))
    return from_start, to_end, whole


def _solve(system: Tensor, right: Tensor, *, adjoint: bool) -> Tensor:
    """(I + system)^-1 right, or that of the transpose. system: strictly lower triangular [Z, C, C].

    Written from the right side, as rows are contiguous: twice as fast as with a copy to columns.
    """
    matrix = system if adjoint else system.mT
    return torch.linalg.solve_triangular(matrix, right.mT, upper=not adjoint, left=False, unitriangular=True).mT


def _steps(key_out: Tensor, read: Tensor, whole: Tensor) -> Tensor:
    """A [Z, Dk, Dk]: what one sub-chunk makes of the state before it."""
    steps = torch.bmm(key_out.mT, read).neg_()
    steps.diagonal(dim1=1, dim2=2).add_(whole[..., 0])
    return steps


def _scan(
    steps: Tensor, offsets: Tensor, state: Tensor, sequences: int, *, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """States that each sub-chunk starts from [Z, Dk, Dv], in the scan's direction, and the last one [S, Dk, Dv]."""
    met = torch.empty_like(offsets)
    step_list, offset_list, met_list = (x.unflatten(0, (sequences, -1)).unbind(1) for x in (steps, offsets, met))
    for index in reversed(range(len(met_list))) if backward else range(len(met_list)):
        met_list[index].copy_(state)
        state = torch.baddbmm(offset_list[index], step_list[index], state)
    return met, state


def _for_each_value_head(rows: Tensor, value: Tensor) -> Tensor:
    """Queries or keys with one head for each value head."""
    groups = value.shape[2] // rows.shape[2]
    return rows if groups == 1 else rows.repeat_interleave(groups, dim=2)


def _l2norm(x: Tensor) -> Tensor:
    return x * _inverse_norm(x)


def _inverse_norm(x: Tensor) -> Tensor:
    """1 / |x| over the last axis, which stays with size 1; finite for x = 0."""
    return torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
