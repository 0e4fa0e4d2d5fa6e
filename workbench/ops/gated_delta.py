"""The gated delta rule over a chunk, with a backward that is linear in the chunk's length.

Same signature, shapes and values as transformers' `torch_chunk_gated_delta_rule`, its reference twin. The difference is
the scan over sub-chunks: the twin writes its output in a loop by slices of one tensor, so that its backward copies the
whole gradient once per sub-chunk; and it does eight small products per step. Here the step is affine in the state,

    S_{i+1} = A_i S_i + B_i,    A_i = decay_i I - K_i^T W_i,    B_i = K_i^T U_i

with all A_i, B_i and afterwards all outputs computed in batched products; the loop holds one product per sub-chunk.

Accumulates in float32 (float64 for float64 inputs). Source: Gated Delta Networks, arXiv 2412.06464, the UT transform.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.types import accumulation_dtype

SUB_CHUNK = 64


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
    initial_state: [B, Hv, Dk, Dv] or None for zeros.
    """
    tokens, given, dtype = query.shape[1], query.dtype, accumulation_dtype(query.dtype)
    groups = value.shape[2] // key.shape[2]
    if groups != 1:
        query, key = query.repeat_interleave(groups, dim=2), key.repeat_interleave(groups, dim=2)
    query, key, value = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    g, beta = (x.transpose(1, 2).to(dtype) for x in (g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _l2norm(query), _l2norm(key)
    query = query * query.shape[-1] ** -0.5

    # sub-chunks [B, H, N, C, ...]; padding has beta 0 and decay 1, so it changes nothing
    padding = -tokens % SUB_CHUNK
    query, key, value = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, SUB_CHUNK)) for x in (query, key, value))
    g, beta = (F.pad(x, (0, padding)).unflatten(2, (-1, SUB_CHUNK)) for x in (g, beta))

    decay = g.cumsum(dim=-1)
    update, read, attention = _within_sub_chunks(query, key, value, decay, beta)
    total = decay[..., -1, None]
    key_out = key * (total - decay).exp()[..., None]  # each key's weight in the state at the end of its sub-chunk
    identity = torch.eye(key.shape[-1], dtype=dtype, device=key.device)
    steps = total.exp()[..., None] * identity - key_out.transpose(-1, -2) @ read
    offsets = key_out.transpose(-1, -2) @ update
    states, final = _scan(steps, offsets, initial_state)

    corrected = update - read @ states
    out = (query * decay.exp()[..., None]) @ states + attention @ corrected
    out = out.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(given)
    return out, final if output_final_state else None


def _within_sub_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the state does not enter: new values U [.., C, Dv], state readers W [.., C, Dk], attention [.., C, C]."""
    size = key.shape[-2]
    hidden = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    pairwise = (decay[..., :, None] - decay[..., None, :]).masked_fill(hidden, float("-inf")).exp()
    key_beta = key * beta[..., None]
    system = (key_beta @ key.transpose(-1, -2)) * pairwise
    attention = (query @ key.transpose(-1, -2)) * pairwise
    right = torch.cat([value * beta[..., None], key_beta * decay.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    update, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    return update, read, attention


def _scan(steps: Tensor, offsets: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """States before each sub-chunk [B, H, N, Dk, Dv] and after the last [B, H, Dk, Dv]."""
    batch, heads, _, key_dim, value_dim = offsets.shape
    state = offsets.new_zeros(batch, heads, key_dim, value_dim) if initial is None else initial.to(offsets.dtype)
    state = state.expand(batch, -1, -1, -1).reshape(batch * heads, key_dim, value_dim)
    before = []
    step_list, offset_list = steps.flatten(0, 1).unbind(1), offsets.flatten(0, 1).unbind(1)
    for step, offset in zip(step_list, offset_list, strict=True):
        before.append(state)
        state = torch.baddbmm(offset, step, state)
    states = torch.stack(before, dim=1).unflatten(0, (batch, heads))
    return states, state.unflatten(0, (batch, heads))


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
