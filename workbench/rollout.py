"""Sample a whole group from one resident state: all members decode together, the prompt's rows exist once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from workbench.architectures import ChunkContext, ChunkOutput
from workbench.comm import Comm, all_ranks, digest, every_rank, require_agreement, shard_of
from workbench.errors import InvalidInputError, NonFiniteError
from workbench.inputs import (
    check_end_ids,
    check_positive,
    check_resident_state,
    check_seed,
    check_temperature,
    entry_point,
)
from workbench.policy import Policy
from workbench.progress import progress
from workbench.state.pages import LayerState, NamedTensors, Page
from workbench.state.placement import row_source
from workbench.state.resident import Carry, ResidentState
from workbench.types import Response, accumulation_dtype, is_number


@entry_point
def sample_responses(
    policy: Policy,
    state: ResidentState,
    num_responses: int,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    eos_token_ids: Sequence[int] | None = (),
    seed: int | None = None,
    allow_stale: bool = False,
) -> list[Response]:
    """Sample `num_responses` responses of at most `max_new_tokens` tokens from the boundary.

    Every member attends over the same resident pages (queries of all members fold into one); only the few rows of the
    responses themselves, and the carries, exist per member.
    eos_token_ids: ids that end a response; empty: every end-of-sequence id the model's own configuration names;
        None: nothing ends a response early. The end id is part of the response.
    seed: same seed, weights and state give the same responses. Raises InvalidInputError, StaleStateError,
    NonFiniteError.
    """
    check_resident_state(state)
    if seed is not None:
        check_seed(seed)
    _check_sampling(policy, state, num_responses, max_new_tokens, temperature, top_p)
    state.require_current(policy.state_key, policy.state_version, allow_stale=allow_stale, purpose="sample_responses")
    ends = () if eos_token_ids is None else check_end_ids(policy, eos_token_ids) or policy.eos_token_ids()
    arguments = digest(num_responses, max_new_tokens, temperature, top_p, ends, seed)
    require_agreement(state.comm, arguments, "sample_responses' arguments", policy.device)
    end_ids = torch.tensor(ends, dtype=torch.int64, device=policy.device)
    generator = torch.Generator(device=policy.device)
    generator.seed() if seed is None else generator.manual_seed(seed)

    decoder = _GroupDecoder(policy, state, num_responses, max_new_tokens)
    ids: list[Tensor] = []
    logprobs: list[Tensor] = []
    finished = torch.zeros(num_responses, dtype=torch.bool, device=policy.device)
    lengths = torch.full((num_responses,), max_new_tokens, dtype=torch.int64, device=policy.device)
    with policy.active(decoding=True), torch.no_grad():
        for step in progress(range(max_new_tokens), "sample", unit="token"):
            hidden = decoder.advance() if step == 0 else decoder.advance(ids[-1])
            chosen, chosen_logprobs = _on_first_rank(
                state.comm,
                num_responses,
                policy,
                partial(_draw, decoder, hidden, temperature, top_p, generator),
            )
            ids.append(chosen)
            logprobs.append(chosen_logprobs)
            ending = torch.isin(chosen, end_ids) & ~finished
            lengths = torch.where(ending, step + 1, lengths)
            finished |= ending
            if bool(finished.all()):
                break
    all_ids, all_logprobs = torch.stack(ids, dim=1).cpu(), torch.stack(logprobs, dim=1).cpu()
    return [
        Response(all_ids[m, :length].clone(), all_logprobs[m, :length].clone(), bool(finished[m]))
        for m, length in enumerate(lengths.tolist())
    ]


def _check_sampling(
    policy: Policy, state: ResidentState, num_responses: int, max_new_tokens: int, temperature: float, top_p: float
) -> None:
    check_positive("num_responses", num_responses)
    check_positive("max_new_tokens", max_new_tokens)
    check_temperature(temperature)
    if not (is_number(top_p) and 0.0 < top_p <= 1.0):
        raise InvalidInputError(f"top_p={top_p!r} must be in (0, 1]")
    needed = state.positions + 1 + max_new_tokens
    if needed > policy.max_positions:
        raise InvalidInputError(
            f"prompt and max_new_tokens need {needed} positions, more than the model's max_position_embeddings of "
            f"{policy.max_positions}; shorten them, or lift the limit with Policy(..., max_positions=N)"
        )


def _sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One id per member, [G], and its log-probability at this temperature before top-p, [G]."""
    logprobs = torch.log_softmax(logits.to(accumulation_dtype(logits.dtype)) / temperature, dim=-1)
    if torch.isnan(logprobs).any():
        raise NonFiniteError(f"sampling at temperature {temperature}: logits divided by it are beyond {logprobs.dtype}")
    probabilities = logprobs.exp()
    if top_p < 1.0:
        ordered, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass before each id: the first id is always kept
        dropped = before >= top_p
        dropped[..., 0] = False  # also where top_p is 0 in this dtype
        kept = ordered.masked_fill(dropped, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, kept)
    chosen = torch.multinomial(probabilities, 1, generator=generator)
    return chosen[:, 0], logprobs.gather(-1, chosen)[:, 0]


def _draw(
    decoder: _GroupDecoder, hidden: Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    return _sample(decoder.logits(hidden), temperature, top_p, generator)


def _on_first_rank(
    comm: Comm | None, group: int, policy: Policy, draw: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Over ranks, rank 0 has the token's hidden state: it draws, and all get the ids [G] and log-probs [G]."""
    if comm is None:
        return draw()
    ids = torch.empty(0, dtype=torch.int64, device=policy.device)
    logprobs = torch.empty(0, dtype=accumulation_dtype(policy.dtype), device=policy.device)
    error: NonFiniteError | None = None
    if comm.rank == 0:
        try:
            ids, logprobs = draw()
        except NonFiniteError as found:  # the others wait for the ids: tell them first
            error = found
    if not every_rank(comm, error is None, policy.device, tag="sampling")[0]:
        raise error or NonFiniteError("sampling: rank 0 found logits that are not finite")
    counts = [group if rank == 0 else 0 for rank in range(comm.size)]
    return comm.all_gather(ids, counts, "sampling")[0], comm.all_gather(logprobs, counts, "sampling")[0]


@dataclass
class _OwnRows:
    """Row buffers of the responses, [G, heads, max_new_tokens, width] by layer and name, filled from the left."""

    layers: list[dict[str, Tensor]]
    start: int
    filled: int = 0

    def page(self) -> Page:
        views: list[NamedTensors] = [
            {name: t[..., : self.filled, :] for name, t in layer.items()} for layer in self.layers
        ]
        return Page(self.start, self.start + self.filled, tuple(views))


class _GroupDecoder:
    """Decodes G members in lockstep over the pages of one resident state."""

    def __init__(self, policy: Policy, state: ResidentState, group: int, max_new_tokens: int) -> None:
        self._policy, self._state, self._group, self._max = policy, state, group, max_new_tokens
        self._rows = _OwnRows([{} for _ in range(policy.adapter.num_layers)], state.positions)
        self._carry: Carry = state.carry_at(state.positions)
        self._source = row_source(state.placement, policy.device)

    def advance(self, ids: Tensor | None = None) -> Tensor:
        """Final hidden states [G or 1, hidden] of one more token; ids [G] are the members' last tokens, None: the last
        prompt token. Over ranks, rank 0 has the token and the others run it as a ghost."""
        # the last prompt token is the same for all members: it runs once
        batch = self._state.prompt_ids[-1:][None].to(self._policy.device) if ids is None else ids[:, None]
        pages = [*self._state.pages, self._rows.page()] if self._rows.filled else self._state.pages
        position = self._state.positions + self._rows.filled
        shard = shard_of(self._state.comm, position, position + 1, turn=position)
        context = ChunkContext(position, pages, self._carry, source=self._source, shard=shard)
        with self._policy.at_boundary() if ids is None else nullcontext():
            return self._checked(batch, context, position)

    def _checked(self, batch: Tensor, context: ChunkContext, position: int) -> Tensor:
        output = self._policy.adapter.forward_chunk(batch, context)
        if not all_ranks(context.shard, bool(torch.isfinite(output.hidden).all()), self._policy.device):
            self._policy.adapter.forward_chunk(batch, context, locate=f"sampling, position {position}")
            raise NonFiniteError(f"sampling, position {position}: NaN or infinity in the final norm")
        self._append(output)
        return output.hidden[:, -1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [G, V]."""
        after_prompt = self._rows.filled == 1  # only the boundary token was run
        with self._policy.at_boundary() if after_prompt else nullcontext():
            logits = self._policy.head(hidden)
        if torch.isnan(logits).any():
            position = self._state.positions + self._rows.filled - 1
            raise NonFiniteError(f"sampling, position {position}: the language-model head gives NaN")
        return logits.expand(self._group, -1)

    def _append(self, output: ChunkOutput) -> None:
        """Store the new token's rows and carry for every member."""
        at = self._rows.filled
        for buffers, layer in zip(self._rows.layers, _in_order(output), strict=True):
            for name, new in layer.rows.items():
                if name not in buffers:
                    shape = (self._group, new.shape[1], self._max * new.shape[2], new.shape[3])
                    buffers[name] = new.new_zeros(shape)  # over ranks, of no rows where another rank keeps them
                buffers[name][:, :, at : at + new.shape[2]] = new
        self._rows.filled = at + 1
        self._carry = tuple(
            {name: t.expand(self._group, *t.shape[1:]) for name, t in layer.carry.items()}
            for layer in _in_order(output)
        )


def _in_order(output: ChunkOutput) -> list[LayerState]:
    return [output.layers[index] for index in range(len(output.layers))]
