"""What this package knows of PEFT's LoRA: which parameters are an adapter's, and how adapters are switched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from workbench.errors import InvalidInputError, UnsupportedModelError

ADAPTER_SCOPES = ("all", "response", "replay")
_OWN_PARAMETERS = ("lora_", "modules_to_save", "trainable_tokens")


def peft_model(model: nn.Module) -> Any:
    """The model as a PEFT model, or None; PEFT methods other than LoRA are refused."""
    configs = getattr(model, "peft_config", None)
    if configs is None or not hasattr(model, "get_base_model"):
        return None
    kinds = {str(getattr(c.peft_type, "value", c.peft_type)) for c in configs.values()}
    if kinds != {"LORA"}:
        raise UnsupportedModelError(f"PEFT methods {sorted(kinds)} are not supported; only LORA is")
    if any(getattr(c, "alora_invocation_tokens", None) for c in configs.values()):
        raise UnsupportedModelError("alora_invocation_tokens: adapters that begin at certain tokens are not supported")
    return model


def is_adapter_parameter(name: str) -> bool:
    """Does the parameter of this name belong to an adapter, so that switching adapters off takes it out?"""
    return any(part in name for part in _OWN_PARAMETERS)


def changes_base(init_lora_weights: Any) -> bool:
    """Initialisations that move part of the base weights into the adapter."""
    known = ("pissa", "olora", "corda", "loftq", "lora_ga")
    return isinstance(init_lora_weights, str) and init_lora_weights.lower().startswith(known)


def adapter_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(getattr(module, "merged_adapters", None), list)]


def adapter_selection(model: nn.Module) -> tuple[Any, ...]:
    """Which adapters act on the model's forward, how strongly, and whether the caller has switched them off."""
    return tuple(
        (
            tuple(layer.active_adapters),
            layer.disable_adapters,
            tuple(layer.merged_adapters),
            tuple(getattr(layer, "scaling", {}).items()),
        )
        for layer in adapter_layers(model)
    )


def rewritten_by_forward(model: nn.Module) -> set[int]:
    """Frozen parameters that PEFT's LoRA on parameters puts back after each forward, which counts as a write."""
    wrappers: list[Any] = [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]
    return {id(p) for w in wrappers for p in w.get_base_layer().parameters(recurse=False) if not p.requires_grad}


def check_frozen_prompt(model: nn.Module, adapter_scope: str, applied_to_prompt_rows: tuple[str, ...]) -> None:
    """Refuse what would let training move the state of a prompt that the adapter may not touch."""
    if peft_model(model) is None:
        raise InvalidInputError(
            f"adapter_scope={adapter_scope!r} switches a LoRA adapter off at prompt positions, and this model has "
            "none; give lora=..., or leave adapter_scope='all'"
        )
    moving = [name for name, p in model.named_parameters() if p.requires_grad and not is_adapter_parameter(name)]
    if moving:
        raise InvalidInputError(
            f"adapter_scope={adapter_scope!r}: {moving[0]} outside the adapter is trainable and would act at prompt "
            "positions too; freeze it, or use adapter_scope='all'"
        )
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in applied_to_prompt_rows and hasattr(module, "lora_A"):
            raise InvalidInputError(
                f"adapter_scope={adapter_scope!r}: responses apply {name} to rows of the prompt again, so its adapter "
                "would act at prompt positions; leave it out of target_modules"
            )


@contextmanager
def selected_adapter(model: Any, name: str) -> Iterator[None]:
    """Adapters off ("base") or one adapter on; PEFT flips requires_grad on the way, which is undone as well."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    tuner, active = model.base_model, list(model.active_adapters)
    try:
        if name == "base":
            with model.disable_adapter():
                yield
        else:
            tuner.set_adapter(name)
            yield
    finally:
        tuner.set_adapter(active)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
