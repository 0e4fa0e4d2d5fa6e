"""Where a plan's model and machine come from: the catalogues in `data/`, a user's own file, or an object given.

Users add models and GPUs in one JSON file of the catalogues' layout ({"models": {...}, "gpus": {...}}), named by the
environment variable LONGSTRAW_CATALOGUE; its entries come before the built-in ones.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.errors import InvalidInputError, first_line
from workbench.planner.families import check_raw_fields, model_shape
from workbench.planner.shapes import ModelShape

# The data lies beside the package: a clone and an editable install (the only ones there are) both have it there.
DATA = Path(__file__).resolve().parents[2] / "data"
THIS_MACHINE = "this machine"
CATALOGUE_VARIABLE = "LONGSTRAW_CATALOGUE"

# Held by context, cuBLAS, NCCL and fragmentation when LongStraw ran out of memory: it passed at 145.176 GB allocated
# and failed 4,096 tokens later, at about 145.28, of 150.755 GB. 5.48 GB, 3.6 % of the card [fitted].
OUTSIDE_SHARE = 0.0364


@dataclass(frozen=True)
class Gpu:
    """One device: memory as its driver reports it, dense bf16 peak, memory and host-link bandwidth.

    outside_bytes: what torch's allocator never gets; None: OUTSIDE_SHARE of the memory.
    """

    name: str
    memory_bytes: int
    bf16_tflops: float
    memory_tb_per_s: float
    link_gb_per_s: float = 50.0
    source: str = "given by the caller"
    confidence: str = "as given"
    outside_bytes: int | None = None

    @property
    def reserve_bytes(self) -> int:
        return round(OUTSIDE_SHARE * self.memory_bytes) if self.outside_bytes is None else self.outside_bytes

    @property
    def flops_per_second(self) -> float:
        return self.bf16_tflops * 1e12

    @property
    def bytes_per_second(self) -> float:
        return self.memory_tb_per_s * 1e12


def read_data(name: str) -> dict[str, Any]:
    """One of the JSON files in `data/`."""
    path = DATA / name
    if not path.is_file():
        raise InvalidInputError(
            f"{path} is not there: the planner's catalogues lie beside the package in a clone; install it with "
            "'pip install -e .' or run from the clone"
        )
    return _read_json(path, path.stat().st_mtime_ns)


def catalogue(kind: str) -> dict[str, Mapping[str, Any]]:
    """Entries of kind "models" or "gpus" by name, the user's own first."""
    entries: dict[str, Mapping[str, Any]] = {}
    own = os.environ.get(CATALOGUE_VARIABLE)
    if own:
        path = Path(own).expanduser()
        if not path.is_file():
            raise InvalidInputError(f"{CATALOGUE_VARIABLE} names {path}, which is no file")
        entries.update(_read_json(path, path.stat().st_mtime_ns).get(kind, {}))
    for name, entry in read_data(f"{kind}.json")[kind].items():
        entries.setdefault(name, entry)
    return entries


def find_gpu(gpu: str | Gpu) -> Gpu:
    """A catalogue entry by name or alias, or the record itself. Raises InvalidInputError with the near matches."""
    if isinstance(gpu, Gpu):
        return gpu
    if not isinstance(gpu, str):
        raise InvalidInputError(f"gpu={gpu!r} is neither a name of the catalogue nor a Gpu")
    if _plain(gpu) == _plain(THIS_MACHINE):
        return this_machine()
    name, entry = _find("gpus", gpu)
    missing = [field for field in ("memory_bytes", "bf16_tflops", "memory_tb_per_s") if field not in entry]
    if missing:
        raise InvalidInputError(f"GPU {name!r} of the catalogue has no field {missing[0]!r}")
    known = {field: entry[field] for field in Gpu.__dataclass_fields__ if field in entry}
    return Gpu(name=name, **known)


def this_machine() -> Gpu:
    """The first CUDA device, or this machine's memory as one device without anything outside the allocator.

    A CPU's rates are placeholders [assumed]: its seconds mean something only with a calibration.
    """
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known = _match("gpus", properties.name.removeprefix("NVIDIA ").replace("Tesla ", ""))
        rates = find_gpu(known) if known else Gpu(properties.name, 0, 100.0, 1.0)
        return replace(rates, name=properties.name, memory_bytes=properties.total_memory, source="measured here")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Gpu(THIS_MACHINE, memory, 0.1, 0.02, source="measured here (memory); rates assumed", outside_bytes=0)


def model_config(name: str) -> Any:
    """The transformers text configuration of a catalogue name."""
    return _config(json.dumps(_find("models", name)[1]["config"], sort_keys=True), name)


def find_model(model: Any) -> ModelShape:
    """The shape of a catalogue name, a folder or config.json, a hub id, a mapping of fields or a configuration object.

    Raises InvalidInputError with the near matches for an unknown name, naming the field for an incomplete one.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return _shape_of_fields(model, str(model.get("_name_or_path") or model.get("model_type") or "the given fields"))
    if not isinstance(model, str | os.PathLike):
        config = getattr(model, "config", model)  # a model brings its configuration along
        return model_shape(config, str(getattr(config, "_name_or_path", "") or type(config).__name__))
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        return _shape_of_path(path / "config.json" if path.is_dir() else path)
    name = str(model)
    if _match("models", name) is None and "/" in name:
        return _shape_of_hub(name)
    return _shape_of_entry(*_find("models", name))


def _shape_of_entry(name: str, entry: Mapping[str, Any]) -> ModelShape:
    return _cached_shape(json.dumps(entry["config"], sort_keys=True), name)


def _shape_of_path(path: Path) -> ModelShape:
    if not path.is_file():
        raise InvalidInputError(f"no configuration at {path}")
    return _shape_of_fields(_read_json(path, path.stat().st_mtime_ns), str(path.parent.name))


def _shape_of_fields(fields: Mapping[str, Any], name: str) -> ModelShape:
    return _cached_shape(json.dumps(dict(fields), sort_keys=True, default=str), name)


def _shape_of_hub(name: str) -> ModelShape:
    from transformers import AutoConfig

    try:
        return model_shape(AutoConfig.from_pretrained(name), name)
    except (OSError, ValueError) as error:
        hint = _near("models", name)
        reason = first_line(error)
        raise InvalidInputError(
            f"{name!r} is neither in the catalogue nor readable from the model hub ({reason}); {hint}"
        ) from None


@lru_cache(maxsize=256)
def _cached_shape(fields: str, name: str) -> ModelShape:
    return model_shape(_config(fields, name), name)


def _config(fields: str, name: str) -> Any:
    """transformers expands a configuration (layer types, index layers); the text part of a multimodal one is read."""
    from transformers import AutoConfig

    raw = json.loads(fields)
    text = raw.get("text_config", raw)
    check_raw_fields(text, name)
    model_type = text.pop("model_type")
    try:
        return AutoConfig.for_model(model_type, **text)
    except ValueError as error:
        raise InvalidInputError(f"transformers does not read the configuration of {name}: {error}") from None


@lru_cache(maxsize=64)
def _read_json(path: Path, modified: int) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{path} is not JSON: {error}") from None


# ---------------------------------------------------------------- names


def _names(kind: str) -> Iterator[tuple[str, str]]:
    """(name or alias, entry's name)."""
    for name, entry in catalogue(kind).items():
        yield name, name
        yield from ((alias, name) for alias in entry.get("aliases", ()))


def _plain(name: str) -> str:
    """'Qwen/Qwen3.6-27B' and 'qwen3.6 27b' are one name."""
    return "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum())


def _match(kind: str, name: str) -> str | None:
    return next((entry for known, entry in _names(kind) if _plain(known) == _plain(name)), None)


def _find(kind: str, name: str) -> tuple[str, Mapping[str, Any]]:
    found = _match(kind, name)
    if found is None:
        what = "model" if kind == "models" else "GPU"
        raise InvalidInputError(f"unknown {what} {name!r}: {_near(kind, name)}")
    return found, catalogue(kind)[found]


def _near(kind: str, name: str) -> str:
    known = dict(_names(kind))
    plain = {_plain(k): k for k in known}
    near = [plain[m] for m in difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.4)]
    if near:
        return f"did you mean {' or '.join(dict.fromkeys(near))}?"
    return f"the catalogue has {', '.join(catalogue(kind))}"
