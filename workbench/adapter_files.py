"""LoRA adapters as files in PEFT's own layout, which PEFT and transformers load without this package.

PEFT reads gate_proj, up_proj and down_proj in a mixture-of-experts model as its routed experts: they were modules of
that name in transformers 4. Dense and shared feed-forwards, which still are, would get no adapter, with a warning only
(peft 0.21). Two ways around that:

- `untranslated_names`, for adapters that this package makes or reads;
- files for others name such a module by its parameter (`target_parameters: ["mlp.up_proj.weight"]`). PEFT translates
  no parameters, the tensors have the same names and shapes, and the model computes the same function up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from workbench.architectures.base import replaced
from workbench.errors import InvalidInputError

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


@contextmanager
def untranslated_names() -> Iterator[None]:
    """Names in an adapter's configuration mean modules of the loaded model, for the duration."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # a PEFT that does not translate yet
        yield
        return
    with replaced(conversion, "convert_peft_config_for_transformers", lambda *_, **__: None):
        yield


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The trained adapter's tensors under the names of PEFT's files; they share memory with the model."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=_adapter_name(model))


def save_adapter(model: Any, folder: Path) -> None:
    """Write the trained adapter of a PEFT model to a folder: adapter_model.safetensors and adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _portable_config(model, _adapter_name(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {name: t.detach().cpu().contiguous() for name, t in adapter_tensors(model).items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def read_adapter(model: nn.Module, folder: Path) -> Any:
    """The model with a saved adapter, trainable. Every tensor of the file must find its place, and every place one."""
    from peft import LoraConfig, get_peft_model

    if hasattr(model, "peft_config"):
        raise InvalidInputError(f"lora={str(folder)!r}: the model has an adapter already; load it without one")
    tensors = read_tensors(folder / ADAPTER_WEIGHTS)
    try:
        config = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidInputError(f"lora={str(folder)!r}: {ADAPTER_CONFIG} cannot be read: {error}") from error
    config.inference_mode = False
    _name_modules(config, model)
    try:
        with torch.random.fork_rng(devices=[]), untranslated_names():
            adapted = get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"lora={str(folder)!r} does not fit this model: {error}") from error
    copy_tensors(adapter_tensors(adapted), tensors, f"lora={str(folder)!r}")
    return adapted


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidInputError(f"{path} is missing, truncated or no safetensors file: {error}") from error


@torch.no_grad()
def copy_tensors(places: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    """Copy tensors into the places of the same names; nothing is written unless all names and shapes agree."""
    missing, unknown = sorted(places.keys() - found.keys()), sorted(found.keys() - places.keys())
    if missing or unknown:
        raise InvalidInputError(
            f"{what} belongs to another model: {len(missing)} tensors are missing in it (such as {missing[:1]}), "
            f"{len(unknown)} have no place (such as {unknown[:1]})"
        )
    for name, place in places.items():
        if found[name].shape != place.shape:
            raise InvalidInputError(
                f"{what} belongs to another model: {name} has shape {tuple(found[name].shape)}, here it is "
                f"{tuple(place.shape)}"
            )
    for name, place in places.items():
        place.copy_(found[name])


def _adapter_name(model: Any) -> str:
    active = list(model.active_adapters)
    if len(active) != 1:
        raise InvalidInputError(f"{len(active)} adapters are active ({', '.join(active)}); one can be saved at a time")
    return active[0]


def _portable_config(model: Any, name: str) -> Any:
    """The adapter's configuration such that a plain PEFT puts the adapter where it is here."""
    config = copy.deepcopy(model.peft_config[name])
    translated = _translated(config, model.get_base_model())
    if not translated or config.use_dora or config.lora_dropout or config.lora_bias:
        return config  # the last three exist for modules only: such adapters need `untranslated_names`
    prefix = "base_model.model."
    adapted = [
        module_name.removeprefix(prefix)
        for module_name, module in model.named_modules()
        if name in getattr(module, "lora_A", {}) and not hasattr(module, "parameter_name")
    ]
    by_parameter = [n for n in adapted if n.rsplit(".", 1)[-1] in translated]
    config.target_modules = sorted(set(adapted) - set(by_parameter))
    config.target_parameters = sorted({*(config.target_parameters or ()), *(f"{n}.weight" for n in by_parameter)})
    return config


def _translated(config: Any, base: nn.Module) -> set[str]:
    """Last parts of module names that PEFT would take for something else in this model."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:
        return set()
    mapping = getattr(conversion, "_MODEL_TO_CONVERSION_PATTERN", {})
    base_type = mapping.get(getattr(getattr(base, "config", None), "model_type", None))
    return set(getattr(conversion, "_MOE_TARGET_MODULE_MAPPING", {}).get(base_type, {}))


def _name_modules(config: Any, model: nn.Module) -> None:
    """Undo `_portable_config`: a targeted weight of a linear layer is that layer."""
    linears = {f"{name}.weight": name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    parameters = set(config.target_parameters or ())
    named = {linears[p] for p in parameters if p in linears}
    if named and not isinstance(config.target_modules, str):
        config.target_modules = {*(config.target_modules or ()), *named}
        config.target_parameters = sorted(parameters - {f"{n}.weight" for n in named}) or None
