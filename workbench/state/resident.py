"""The resident state: what remains of a prompt after its graph-free capture."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from workbench.comm import Comm
from workbench.errors import InvalidInputError, StaleStateError
from workbench.state.pages import NamedTensors, Page, total_nbytes

Carry = tuple[NamedTensors, ...]
Choices = Mapping[tuple[int, str], Tensor]


class ResidentState:
    """Read-only state of a captured prompt: pages of rows, and the carry at the boundary.

    positions: number of resident positions B = P - 1. The last prompt token is not resident: its logits score the first
        response token, so it is replayed with every response.
    weight_version: the policy's weight version at capture; use under another one is refused.
    prompt_ids: [P] int64, on the CPU.
    placement: "device" or "host". choices: what each chunk selected, so that a recompute can be held against it.
    boundaries: carries at the start of every chunk are kept as well (needed to walk back through the prompt).
    comm: the ranks that share it; then pages, carries, nbytes, inventory and checksum are of this rank's part.

    Tensors are shared with every replay and must not be written to; `checksum()` shows whether anyone did.
    """

    def __init__(
        self,
        *,
        policy_key: object,
        weight_version: int,
        prompt_ids: Tensor,
        pages: tuple[Page, ...],
        carries: dict[int, Carry],
        chunk_tokens: int,
        boundaries: bool,
        placement: str = "device",
        choices: tuple[Choices, ...] = (),
        comm: Comm | None = None,
    ) -> None:
        self._policy_key = policy_key
        self._weight_version = weight_version
        self._prompt_ids = prompt_ids
        self._pages = pages
        self._carries = carries
        self._chunk_tokens = chunk_tokens
        self._boundaries = boundaries
        self._placement = placement
        self._choices = choices
        self._comm = comm

    @property
    def positions(self) -> int:
        return int(self._prompt_ids.numel()) - 1

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @property
    def prompt_ids(self) -> Tensor:
        return self._prompt_ids

    @property
    def pages(self) -> tuple[Page, ...]:
        return self._pages

    @property
    def chunk_tokens(self) -> int:
        return self._chunk_tokens

    @property
    def boundaries(self) -> bool:
        return self._boundaries

    @property
    def placement(self) -> str:
        """Where the rows live: "device" or "host"."""
        return self._placement

    @property
    def comm(self) -> Comm | None:
        """The ranks that share this prompt's tokens, each with its own rows and heads; None: one process has all."""
        return self._comm

    def choices_of(self, index: int) -> Choices:
        """What the layers of page `index` selected without a gradient, hashed: {(layer, kind): int64}."""
        return self._choices[index]

    def carry_at(self, position: int) -> Carry:
        """Carry of every layer before the token at `position` (a chunk start, or the boundary)."""
        return self._carries[position]

    def release_from(self, position: int) -> None:
        """Drop pages that begin at `position` or later, and carries after it: a walk that has come here is past them.

        For a state that its step owns; it can only be walked further afterwards.
        """
        self._pages = tuple(page for page in self._pages if page.start < position)
        self._carries = {at: carry for at, carry in self._carries.items() if at <= position}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for page in self._pages:
            for rows in page.layers:
                yield from rows.items()
        for position, carry in self._carries.items():
            kind = "" if position == self.positions else "boundary_"
            for layer in carry:
                yield from ((kind + name, tensor) for name, tensor in layer.items())

    def row_tensors(self) -> Iterator[Tensor]:
        for page in self._pages:
            yield from page.tensors()

    def carry_tensors(self) -> Iterator[Tensor]:
        for carry in self._carries.values():
            for layer in carry:
                yield from layer.values()

    @property
    def nbytes(self) -> int:
        """Resident bytes: rows, carry and boundary carries."""
        return total_nbytes(tensor for _, tensor in self.named_tensors())

    def inventory(self) -> dict[str, int]:
        """Bytes by kind of state; kinds of chunk-boundary carries are prefixed "boundary_"."""
        kinds: dict[str, int] = {}
        for kind, tensor in self.named_tensors():
            kinds[kind] = kinds.get(kind, 0) + tensor.nbytes
        return kinds

    def checksum(self) -> str:
        """SHA-256 over every resident tensor's bytes, in order."""
        digest = hashlib.sha256()
        for kind, tensor in self.named_tensors():
            digest.update(f"{kind}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def require_current(self, policy_key: object, weight_version: int, *, allow_stale: bool, purpose: str) -> None:
        """Refuse another policy's state always, and another weight version's unless asked.

        Raises InvalidInputError or StaleStateError; returns silently when the state may be used.
        """
        if self._policy_key is not policy_key:
            raise InvalidInputError(
                f"{purpose}: this resident state was captured by another policy (or by its reference); "
                "capture the prompt with the policy that is to use it"
            )
        if not allow_stale and self._weight_version != weight_version:
            raise StaleStateError(
                f"{purpose}: the resident state was captured at weight version {self._weight_version}, the policy is "
                f"at {weight_version}; capture the prompt again (allow_stale=True lets scoring, sampling "
                "and response_only steps use it, and no other scope)"
            )

    def __repr__(self) -> str:
        return (
            f"ResidentState(positions={self.positions}, weight_version={self.weight_version}, "
            f"nbytes={self.nbytes:,}, pages={len(self._pages)})"
        )
