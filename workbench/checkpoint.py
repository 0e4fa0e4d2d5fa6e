"""Checkpoints of a training run: all that the rest of the run depends on, written at once or not at all.

    output_dir/checkpoints/step-00000040/
        adapter_model.safetensors, adapter_config.json   a LoRA policy's adapter, as PEFT loads it, or
        model.safetensors, config.json, ...              the whole model, as transformers loads it
        trainer_state.safetensors                        optimizer moments, random number generators, and what is
                                                         trained beside the adapter
        trainer_state.json                               position, schedule, identity of the run, digests of the files

A checkpoint is made in a folder beside its place, brought to disk, and renamed: whenever the process ends, a folder
with that name is complete. No file is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from workbench.adapter_files import ADAPTER_WEIGHTS, adapter_tensors, copy_tensors, read_tensors, save_adapter
from workbench.canonical import canonical
from workbench.errors import InvalidInputError
from workbench.lora import peft_model
from workbench.policy import Policy
from workbench.records import write_record

FORMAT = "longstraw-checkpoint-1"
STATE_TENSORS, STATE = "trainer_state.safetensors", "trainer_state.json"
_PREFIX, _BESIDE = "step-", "weight."


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step:08d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step in a run's `checkpoints` folder."""
    return max(folder.glob(f"{_PREFIX}*"), default=None)


def save_checkpoint(
    folder: Path,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    progress: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and remove all but the latest `keep`. progress: whatever JSON the run adds."""
    folder.mkdir(parents=True, exist_ok=True)
    target, temporary = checkpoint_path(folder, step), folder / f".writing-{step:08d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _save_weights(policy, temporary)
        tensors, param_groups = _optimizer_tensors(optimizer)
        beside = {name: p.detach().cpu().contiguous() for name, p in _beside_adapter(policy).items()}
        save_file(tensors | _torch_generators() | beside, temporary / STATE_TENSORS)
        state = {
            "format": FORMAT,
            "step": step,
            "files": {path.name: _digest(path) for path in sorted(temporary.iterdir())},
            "parameters": [name for name, _ in policy.trainable_parameters()],
            "optimizer": {"class": type(optimizer).__name__, "param_groups": param_groups},
            "scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"},
            "generators": _other_generators(),
            **progress,
        }
        write_record(temporary / STATE, state)
        for path in (*temporary.iterdir(), temporary):
            _to_disk(path)
        temporary.rename(target)
        _to_disk(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in sorted(folder.glob(f"{_PREFIX}*"))[:-keep]:
        shutil.rmtree(old)
    return target


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state of a checkpoint after every file was held against its digest; nothing is loaded yet."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        known = isinstance(state, dict) and state["format"] == FORMAT
        files = state["files"] if known else {}
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInputError(f"{path} is no checkpoint of this package: {STATE}: {error!r}") from error
    if not known:
        raise InvalidInputError(f"{path} is no checkpoint of this package: {STATE} has another format")
    for name, digest in files.items():
        if not (path / name).is_file() or _digest(path / name) != digest:
            raise InvalidInputError(
                f"{path / name} is missing, truncated or changed since it was written; remove the folder {path.name} "
                "to go on from an earlier checkpoint"
            )
    return state


def load_checkpoint(
    path: Path, state: Mapping[str, Any], policy: Policy, optimizer: torch.optim.Optimizer, scheduler: Any
) -> None:
    """Put everything of a checkpoint that `read_checkpoint` has checked where it was.

    Raises InvalidInputError, before anything is changed, if it is of another model or optimizer.
    """
    names = [name for name, _ in policy.trainable_parameters()]
    if state["parameters"] != names or state["optimizer"]["class"] != type(optimizer).__name__:
        raise InvalidInputError(f"{path} is of another model: other parameters were trained, or by another optimizer")
    tensors = read_tensors(path / STATE_TENSORS)
    _load_weights(policy, path, {name: t for name, t in tensors.items() if name.startswith(_BESIDE)})
    optimizer.load_state_dict(_optimizer_state(tensors, state["optimizer"]["param_groups"]))
    scheduler.load_state_dict({**state["scheduler"], "lr_lambdas": [None] * len(optimizer.param_groups)})
    _restore_generators(tensors, state["generators"])


def model_identity(policy: Policy, *, trained: bool = False) -> dict[str, Any]:
    """What tells a policy from another one: a run may only go on with the same.

    trained: the values of its trainable parameters too; without them, those of the run's own policy, which moves.
    """
    digest = hashlib.sha256()
    for name, parameter in policy.model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}{parameter.requires_grad}".encode())
        if trained or not parameter.requires_grad:
            digest.update(_sum_of_bits(parameter).to_bytes(8, "little", signed=True))
    digest.update(canonical(_adapter_configs(policy)).encode())
    return {
        "model": type(policy.adapter.causal_lm).__name__,
        "parameters": digest.hexdigest(),
        "adapter_scope": policy.adapter_scope,
        "vocab_size": policy.vocab_size,
    }


def _adapter_configs(policy: Policy) -> dict[str, dict[str, Any]]:
    """Every adapter's configuration, but for where the model was loaded from and by which PEFT."""
    peft = peft_model(policy.model)
    configs = {} if peft is None else {name: config.to_dict() for name, config in peft.peft_config.items()}
    elsewhere = ("base_model_name_or_path", "peft_version")
    return {name: {k: v for k, v in config.items() if k not in elsewhere} for name, config in configs.items()}


# ---------------------------------------------------------------- weights


def _save_weights(policy: Policy, folder: Path) -> None:
    model: Any = policy.model
    if peft_model(model) is not None:
        save_adapter(model, folder)
    else:
        with _without_bars():
            model.save_pretrained(folder)


def _load_weights(policy: Policy, path: Path, beside: Mapping[str, Tensor]) -> None:
    """beside: what `_beside_adapter` saved."""
    what = f"checkpoint {path}"
    if peft_model(policy.model) is not None:
        places = adapter_tensors(policy.model) | _beside_adapter(policy)
        copy_tensors(places, read_tensors(path / ADAPTER_WEIGHTS) | dict(beside), what)
        return
    model: Any = policy.model
    # in a dtype that holds all others: `dtype=` is of every parameter, and in a narrower one some lose bits
    widest = reduce(torch.promote_types, (p.dtype for p in model.parameters()))
    with _without_bars():
        saved = type(model).from_pretrained(path, dtype=widest)
    copy_tensors(dict(model.named_parameters()), dict(saved.named_parameters()), what)


def _beside_adapter(policy: Policy) -> dict[str, Tensor]:
    """Trained parameters that are no part of the adapter's files, such as norms that were made trainable, by name."""
    if peft_model(policy.model) is None:
        return {}
    in_files = {tensor.data_ptr() for tensor in adapter_tensors(policy.model).values()}
    return {f"{_BESIDE}{n}": p for n, p in policy.trainable_parameters() if p.data_ptr() not in in_files}


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers' bars for a checkpoint every few steps would fill a notebook."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _sum_of_bits(tensor: Tensor) -> int:
    """An order-blind checksum at memory speed: it tells other weights, not an adversary's."""
    flat = tensor.detach().contiguous().flatten()
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(flat.view(kinds[flat.element_size()]).sum(dtype=torch.int64)) if flat.numel() else 0


# ---------------------------------------------------------------- optimizer


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """State tensors by "optimizer.<parameter index>.<name>", and the parameter groups, which are JSON."""
    state = optimizer.state_dict()
    tensors = {
        f"optimizer.{index}.{name}": value.detach().cpu().contiguous()
        for index, values in state["state"].items()
        for name, value in values.items()
    }
    return tensors, state["param_groups"]


def _optimizer_state(tensors: Mapping[str, Tensor], param_groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, *rest = key.split(".")
        if kind == "optimizer":
            state.setdefault(int(rest[0]), {})[rest[1]] = value
    groups = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in param_groups]
    return {"state": state, "param_groups": groups}


# ---------------------------------------------------------------- random number generators


def _torch_generators() -> dict[str, Tensor]:
    """The engine draws from generators of its own, seeded by step; reward functions may use these."""
    found = {"generator.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"generator.cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def _other_generators() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 (rewards may use it)
    inner = {"key": numpy_state["state"]["key"].tolist(), "pos": int(numpy_state["state"]["pos"])}
    return {
        "python": [version, list(internal), gauss],
        "numpy": {**numpy_state, "state": inner},
    }


def _restore_generators(tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["generator.cpu"])
    cuda = [tensors[name] for name in sorted(tensors) if name.startswith("generator.cuda")]
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
    version, internal, gauss = others["python"]
    random.setstate((version, tuple(internal), gauss))
    inner = others["numpy"]["state"]
    state = {**others["numpy"], "state": {**inner, "key": np.array(inner["key"], dtype=np.uint32)}}
    np.random.set_state(state)  # noqa: NPY002


# ---------------------------------------------------------------- files


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
