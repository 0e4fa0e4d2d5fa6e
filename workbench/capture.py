"""Capture a prompt once, without a graph, as resident state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.architectures import ChunkContext, ChunkOutput
from workbench.comm import Mesh, Shard, all_ranks, digest, require_agreement, shard_of
from workbench.errors import NonFiniteError
from workbench.inputs import Ids, check_positive, check_prompt, check_ranks, entry_point
from workbench.memory import NO_METER, MemoryMeter
from workbench.policy import Policy
from workbench.progress import progress
from workbench.replicas import require_same_weights
from workbench.state.pages import NamedTensors, Page, exact_copy, last_rows
from workbench.state.placement import check_placement, row_source, to_host
from workbench.state.resident import Carry, Choices, ResidentState
from workbench.types import Tally


@entry_point
def capture_prompt(
    policy: Policy,
    prompt_ids: Ids,
    *,
    chunk_tokens: int = 1024,
    keep_boundaries: bool = True,
    placement: str = "device",
    comm: Mesh | None = None,
    meter: MemoryMeter | None = None,
    tally: Tally | None = None,
) -> ResidentState:
    """Run prompt_ids[:-1] through the policy in chunks without autograd and keep what later tokens need.

    prompt_ids: [P] integer ids, P >= 1. The result does not depend on chunk_tokens beyond rounding.
    keep_boundaries: also keep the carry at every chunk start and, in sliding-window layers, the rows that each chunk
        sees; the gradient scopes "full", Tail and Sampled need them, "response_only" does not.
    placement: "device", or "host" to keep rows in host memory and stage one layer at a time (state/placement.py).
    comm: the mesh of ranks that share the prompt's tokens; every rank calls with the same arguments and keeps its own
        part. What is done with the state later runs over the same ranks.
    meter, tally: the caller's, to be measured and counted in.
    Raises InvalidInputError, NonFiniteError (naming chunk and layer), UnsupportedModelError.
    """
    check_positive("chunk_tokens", chunk_tokens)
    check_placement(placement)
    prompt = check_prompt(policy, prompt_ids)
    ranks = check_ranks(policy, comm)
    if comm is not None:
        require_same_weights(policy, comm)
        require_agreement(
            ranks, digest(prompt, chunk_tokens, keep_boundaries, placement), "capture_prompt's arguments", policy.device
        )
    meter = meter or NO_METER
    weight_version = policy.state_version
    boundary = prompt.numel() - 1
    pages: list[Page] = []
    carry: Carry = empty_carry(policy)
    carries: dict[int, Carry] = {0: carry}
    choices: list[Choices] = []
    source = row_source(placement, policy.device, tally)
    with policy.active(), policy.at_prompt(), torch.no_grad():
        for start, stop in progress(list(chunk_spans(0, boundary, chunk_tokens)), "capture", unit="chunk"):
            shard = shard_of(ranks, start, stop)
            context = ChunkContext(start, pages, carry, source=source, shard=shard)
            place = f"capture, prompt chunk [{start}, {stop})"
            ids = own_ids(prompt[start:stop], shard).to(policy.device)[None]
            output = forward_checked(policy, ids, context, place, need_hidden=False)
            if not keep_boundaries:
                carries.clear()
                pages = _forget_unseen_rows(policy, pages, stop)
            pages.append(keep_page(policy, output, start, stop, placement, meter, shard))
            carries[stop] = carry = keep_carry(output, meter)
            choices.append(output.run.choices)
            del output, context  # their projections must be gone before the next chunk allocates its own
    return ResidentState(
        policy_key=policy.state_key,
        weight_version=weight_version,
        prompt_ids=prompt,
        pages=tuple(pages),
        carries=carries,
        chunk_tokens=chunk_tokens,
        boundaries=keep_boundaries,
        placement=placement,
        choices=tuple(choices),
        comm=ranks,
    )


def chunk_spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) of at most `size` positions."""
    return ((a, min(a + size, stop)) for a in range(start, stop, size))


def empty_carry(policy: Policy) -> Carry:
    return tuple({} for _ in range(policy.adapter.num_layers))


def forward_checked(
    policy: Policy, ids: Tensor, context: ChunkContext, place: str, *, need_hidden: bool = True, **options: Any
) -> ChunkOutput:
    """forward_chunk of ids [batch, tokens]; on NaN or infinity it is run again to name the layer."""
    output = policy.adapter.forward_chunk(ids, context, need_hidden=need_hidden, **options)
    last = output.layers[policy.adapter.num_layers - 1]
    results = [output.hidden] if need_hidden else [output.hidden, *last.rows.values(), *last.carry.values()]
    finite = all(bool(torch.isfinite(t).all()) for t in results)
    if not all_ranks(context.shard, finite, policy.device):
        with torch.no_grad():
            policy.adapter.forward_chunk(ids, context, need_hidden=need_hidden, locate=place)
        raise NonFiniteError(f"{place}: NaN or infinity appears in the final norm; check its weights and the dtype")
    return output


def own_ids(ids: Tensor, shard: Shard | None) -> Tensor:
    """The ids [T] of a chunk that this process runs."""
    return ids if shard is None else shard.own_ids(ids)


def keep_page(
    policy: Policy,
    output: ChunkOutput,
    start: int,
    stop: int,
    placement: str,
    meter: MemoryMeter,
    shard: Shard | None = None,
) -> Page:
    """Exact-size copies of the rows of this process that tokens from `stop` on can see."""
    last = stop if shard is None else shard.last
    layers: list[NamedTensors] = []
    with meter.ledger("rows"):
        for index in range(policy.adapter.num_layers):
            layer, limit = output.layers[index], policy.adapter.row_limit(index)
            layers.append(exact_copy(layer.rows if limit is None else last_rows(layer.rows, limit - (stop - last))))
    if placement == "host":
        layers = [to_host(rows) for rows in layers]
    return Page(start, stop, tuple(layers), last)


def keep_carry(output: ChunkOutput, meter: MemoryMeter) -> Carry:
    with meter.ledger("carry"):
        return tuple(exact_copy(output.layers[index].carry) for index in range(len(output.layers)))


def _forget_unseen_rows(policy: Policy, pages: Sequence[Page], stop: int) -> list[Page]:
    """Drop sliding-window rows that no token from `stop` on can see; exact-size copies, so their bytes are freed."""
    limits = [policy.adapter.row_limit(index) for index in range(policy.adapter.num_layers)]
    if all(limit is None for limit in limits):
        return list(pages)
    kept = []
    for page in pages:
        layers: list[NamedTensors] = []
        for rows, limit in zip(page.layers, limits, strict=True):
            last = page.stop if page.last is None else page.last
            count = None if limit is None else max(0, limit - (stop - last))
            shorter = count is not None and any(t.shape[-2] > count for t in rows.values())
            layers.append(exact_copy(last_rows(rows, count)) if shorter and count is not None else rows)
        kept.append(Page(page.start, page.stop, tuple(layers), page.last))
    return kept
