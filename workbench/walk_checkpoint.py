"""A prompt walk that can be interrupted: what it has gathered so far, on disk, between two chunks.

With `update_step(..., walk_checkpoint=folder)` the step writes, after the replay and then every few chunks of the walk,
everything that capturing the prompt again cannot give back: parameter gradients so far, the gradient pages and the
carry gradient that are still to be walked, and what the replay reported. The same call with the same inputs goes on
from there; the prompt is captured again, the responses are not replayed again. On the same machine and number of
threads the gradient is bitwise that of an uninterrupted step.

Two files: tensors in `walk-<position>.pt`, and `walk.json`, which names that file with its SHA-256 and the
identity of the step. The second replaces its predecessor at once, so there is always one whole checkpoint. Both are
removed when the step has finished.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import InvalidInputError
from workbench.inputs import check_positive
from workbench.objective import TokenSums
from workbench.policy import Policy
from workbench.records import write_record
from workbench.state.pages import GradientPages
from workbench.step import Step
from workbench.walk import CarryGradient

FORMAT = "longstraw-walk-1"
MANIFEST = "walk.json"


@dataclass(frozen=True)
class WalkCheckpoint:
    """Where a step keeps its interrupted walk, and after how many chunks of it.

    folder: one step's own; it is created. every_chunks: a checkpoint costs about the bytes of the gradient pages that
    are left and of the parameters' gradients.
    """

    folder: str | Path
    every_chunks: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path) or not str(self.folder):
            raise InvalidInputError(f"walk_checkpoint: {self.folder!r} is not a folder's path")
        check_positive("WalkCheckpoint.every_chunks", self.every_chunks)


@dataclass
class WalkKeeper:
    """Saves and restores one step's walk; without options it only remembers what was walked.

    identity: what the checkpoint belongs to; any difference refuses it. walked: starts of the chunks walked so far.
    """

    options: WalkCheckpoint | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] | None = None
    walked: list[int] = field(default_factory=list)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _unsaved: int = 0

    @property
    def folder(self) -> Path:
        assert self.options is not None
        return Path(self.options.folder)

    @property
    def resumes(self) -> bool:
        return self.manifest is not None

    @property
    def position(self) -> int | None:
        """Chunks from here on had been walked when it was saved last; None: it was not."""
        return None if self.manifest is None else int(self.manifest["position"])

    def restore(self, policy: Policy, step: Step, pages: GradientPages) -> CarryGradient | None:
        """Put everything back; returns the gradient of the carry at `position`."""
        assert self.manifest is not None
        replay, tensors = self.manifest["replay"], self._tensors
        carry: list[dict[str, Tensor]] = [{} for _ in range(policy.adapter.num_layers)]
        parameters = dict(policy.trainable_parameters())
        logprobs = {}
        while tensors:  # one at a time: never everything twice
            key, tensor = tensors.popitem()
            kind, *path = key.split("/")
            if kind == "gradient":
                parameters[path[0]].grad = tensor.to(policy.device)
            elif kind == "page":
                pages.put(int(path[0]), int(path[1]), path[2], tensor)
            elif kind == "carry":
                carry[int(path[0])][path[1]] = tensor.to(policy.device)
            else:
                logprobs[int(path[0])] = tensor
        step.logprobs = [logprobs[index] for index in range(replay["num_replayed"])]
        step.sums = [TokenSums(**{k: _number(v) for k, v in sums.items()}) for sums in replay["sums"]]
        step.loss, step.entropy_sum, step.num_blocks = replay["loss"], replay["entropy_sum"], replay["num_blocks"]
        step.tally.clear()  # what the second capture counted was counted by the first
        step.tally.update(replay["tally"])
        pages.num_allocated = replay["gradient_page_tensors"]
        self.walked = list(self.manifest["walked"])
        return tuple(carry) if self.manifest["has_carry"] else None

    def passed(
        self, policy: Policy, step: Step, pages: GradientPages, position: int, carry_gradient: CarryGradient | None
    ) -> None:
        """Note that the walk has come to `position`; the first time, and then every few chunks, it is saved."""
        if position < step.prompt.numel() - 1:
            self.walked.append(position)
        if self.options is None:
            return
        self._unsaved += 1
        if self.manifest is None or self._unsaved >= self.options.every_chunks:
            self._save(policy, step, pages, position, carry_gradient)
            self._unsaved = 0

    def _save(
        self, policy: Policy, step: Step, pages: GradientPages, position: int, carry_gradient: CarryGradient | None
    ) -> None:
        tensors = {f"gradient/{n}": p.grad for n, p in policy.trainable_parameters() if p.grad is not None}
        tensors |= {f"page/{start}/{layer}/{name}": tensor for start, layer, name, tensor in pages.items()}
        for index, layer in enumerate(carry_gradient or ()):
            tensors |= {f"carry/{index}/{name}": tensor for name, tensor in layer.items()}
        tensors |= {f"logprobs/{index}": logprobs for index, logprobs in enumerate(step.logprobs)}
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"walk-{position}.pt"
        partial = file.with_suffix(".partial")
        torch.save({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, partial)
        partial.replace(file)
        replay = {
            "num_replayed": len(step.logprobs),
            "sums": [{k: repr(v) for k, v in asdict(sums).items()} for sums in step.sums],
            "loss": step.loss,
            "entropy_sum": step.entropy_sum,
            "num_blocks": step.num_blocks,
            "tally": dict(step.tally),
            "gradient_page_tensors": pages.num_allocated,
        }
        self.manifest = {
            "format": FORMAT,
            "identity": dict(self.identity),
            "position": position,
            "walked": self.walked,
            "has_carry": carry_gradient is not None,
            "replay": replay,
            "file": file.name,
            "sha256": _file_digest(file),
        }
        write_record(self.folder / MANIFEST, self.manifest)
        for other in self.folder.glob("walk-*.pt"):
            if other != file:
                other.unlink()

    def discard(self) -> None:
        """The step is done: its checkpoint must not be taken up again."""
        if self.options is None:
            return
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for file in self.folder.glob("walk-*.*"):
            file.unlink()


def open_walk(options: WalkCheckpoint, identity: Mapping[str, Any]) -> WalkKeeper:
    """The keeper of a step, with the checkpoint in its folder if there is one.

    Raises InvalidInputError for a damaged checkpoint and for another step's, naming what differs.
    """
    keeper = WalkKeeper(options, identity)
    path = keeper.folder / MANIFEST
    if keeper.folder.exists() and not keeper.folder.is_dir():
        raise InvalidInputError(f"walk_checkpoint: {keeper.folder} is a file; give a folder")
    if not path.exists():
        return keeper
    advice = "give another folder, or delete this one to begin the walk again"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']!r} is not {FORMAT}")
        theirs = dict(manifest["identity"])
        file, digest = keeper.folder / manifest["file"], manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"walk_checkpoint: {path} is damaged ({error!r}); {advice}") from None
    differing = sorted(k for k in theirs.keys() | identity.keys() if theirs.get(k) != identity.get(k))
    if differing:
        raise InvalidInputError(
            f"walk_checkpoint: {keeper.folder} holds the walk of another step (its {', '.join(differing)} "
            f"{'differs' if len(differing) == 1 else 'differ'}); {advice}"
        )
    try:
        if _file_digest(file) != digest:
            raise ValueError("its SHA-256 is not the recorded one")
        keeper._tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise InvalidInputError(f"walk_checkpoint: {file} is damaged ({error}); {advice}") from None
    keeper.manifest = manifest
    return keeper


def step_identity(policy: Policy, step: Step, **options: Any) -> dict[str, Any]:
    """What must be equal for a walk to be gone on with: weights, tokens, advantages, objective, options, torch.

    The weights by their content, so that a new process recognises them; options by their text.
    """
    weights = [*policy.model.named_parameters(), *policy.model.named_buffers()]
    old = step.old_logprobs
    return {
        "weights": _digest(tensor for _, tensor in weights),
        "trained": _text_digest(repr([name for name, _ in policy.trainable_parameters()])),
        "prompt": _digest([step.prompt]),
        "responses": _digest(step.responses),
        "advantages": _text_digest(repr((step.advantages, step.kept, step.denominators))),
        "old_logprobs": None if old is None else _digest(old),
        "objective": repr(step.objective),
        "torch": torch.__version__,
        **{name: repr(value) for name, value in options.items()},
    }


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _number(text: str) -> Any:
    """As `repr` wrote it; infinities included, which JSON does not have."""
    return int(text) if text.lstrip("-").isdigit() else float(text)
