"""NF4 weights through bitsandbytes: how they are asked for, kept differentiable, and what they leave out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from workbench.errors import InvalidInputError, UnsupportedModelError
from workbench.lora import is_adapter_parameter

# On some processors bitsandbytes warns, when imported, that an optional kernel of a model hub is missing. PEFT imports
# it wherever it is installed: the warning would stand in every notebook that trains an adapter, quantized or not.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in record.getMessage()
)


def nf4_config(dtype: torch.dtype | None) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise InvalidInputError("quantization='nf4' needs bitsandbytes: install the `quantization` extra") from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype or torch.float32,
    )


def unquantized_weights(model: nn.Module) -> dict[str, int]:
    """Bytes of each matrix that 4-bit quantisation left alone, by name; empty if the model has no 4-bit layer.

    bitsandbytes quantises nn.Linear. Stacked expert weights of transformers 5 are 3-D parameters and stay in full
    precision, as do embedding, head and router; adapters are trained in full precision by design and are not listed.
    """
    if not any(hasattr(p, "quant_state") for p in model.parameters()):
        return {}
    return {
        name: parameter.nbytes
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and not hasattr(parameter, "quant_state") and not is_adapter_parameter(name)
    }


def quantization_notes(model: nn.Module) -> list[str]:
    """In words, for a report: what 4-bit quantisation left out, stacked experts by name."""
    left = unquantized_weights(model)
    if not left:
        return []
    stacked = [name for name in left if ".experts." in name]
    note = f"NF4 left {len(left)} matrices of {sum(left.values()) / 2**20:.1f} MiB unquantised"
    if stacked:
        note += f", among them {len(stacked)} stacked expert weights ({', '.join(stacked)})"
    return [note]


@contextmanager
def differentiable_quantized_layers(model: nn.Module) -> Iterator[None]:
    """Keep bitsandbytes from repacking 4-bit weights, which it does on some CPUs at the first pass without a graph.

    Repacked weights are another computation, and one without a backward: gradients would silently lack its part.
    """
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    for layer in layers:
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise UnsupportedModelError(
                "bitsandbytes has repacked 4-bit weights for inference, which leaves them without a gradient; load the "
                "model again and hand it over before its first forward pass"
            )
    before = [layer.support_avx512bf16_for_cpu for layer in layers]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.support_avx512bf16_for_cpu = value
