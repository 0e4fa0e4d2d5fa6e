"""Load a policy from a model, a path, a hub id or the bundled demo model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.adapter_files import read_adapter, untranslated_names
from workbench.architectures import adapter_for
from workbench.errors import InvalidInputError, first_line
from workbench.inputs import check_seed
from workbench.lora import ADAPTER_SCOPES
from workbench.model_sources import BUNDLED_MODELS, bundled_model_path, gemma3_270m_path
from workbench.policy import Policy
from workbench.quantization import nf4_config

DEMO_MODEL = "gemma3-270m"


def load_policy(
    source: str | Path | nn.Module,
    *,
    lora: int | Mapping[str, Any] | Any | None = None,
    quantization: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    adapter_scope: str = "all",
    seed: int = 0,
    reference: str | nn.Module | Policy | None = None,
    vocab_size: int | None = None,
    max_positions: int | None = None,
) -> Policy:
    """Load a causal LM and wrap it, with a fresh LoRA adapter if asked.

    source: a transformers or PEFT model, a folder, a hub id, "gemma3-270m" (the real model of the `demo` extra) or the
        name of a small model trained here (`model_sources.BUNDLED_MODELS`).
    lora: rank, a mapping of `peft.LoraConfig` fields, a LoraConfig, or the folder of a saved adapter, to be trained on;
        alpha defaults to 2 x rank, targets to every
        nn.Linear of the decoder but the sparse-attention indexer, which takes no gradient. Routers and stacked expert
        weights are no nn.Linear and stay frozen; experts are adapted with
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]. Names mean modules of the loaded model:
        PEFT's translation of names from transformers 4 is off. The base model is frozen; B starts at zero.
    seed: of the adapter's initial values.
    quantization: None or "nf4" (bitsandbytes, for folders and hub ids). It quantises nn.Linear only: stacked expert
        weights, embedding and head stay as they are (`Policy.unquantized_weights` names them).
    adapter_scope: where the adapter acts; "response" and "replay" leave the prompt to the base model, and default
        targets then leave out what responses apply to prompt rows (kv_b_proj of latent attention).
    reference, vocab_size, max_positions: see `Policy`.
    """
    if adapter_scope not in ADAPTER_SCOPES:
        raise InvalidInputError(f"adapter_scope={adapter_scope!r} is not one of {', '.join(ADAPTER_SCOPES)}")
    if adapter_scope != "all" and lora is None and not hasattr(source, "peft_config"):
        raise InvalidInputError(
            f"adapter_scope={adapter_scope!r} is about a LoRA adapter: give lora=..., or a PEFT model as source"
        )
    if quantization not in (None, "nf4"):
        raise InvalidInputError(f"quantization={quantization!r} is not one of None, 'nf4'")
    check_seed(seed)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidInputError(f"dtype={dtype!r} is no floating-point torch.dtype, such as torch.bfloat16")
    _check_device(device)
    if lora is not None and isinstance(reference, str) and reference != "base":
        raise InvalidInputError(
            f"reference={reference!r} is not a loaded adapter; beside the fresh one there is only 'base'"
        )
    if isinstance(source, nn.Module):
        # refuses before the model is changed
        Policy(
            source,
            reference=None if lora is not None else reference,
            adapter_scope="all" if lora is not None else adapter_scope,
            vocab_size=vocab_size,
            max_positions=max_positions,
        )
        if quantization is not None:
            raise InvalidInputError("quantization applies while weights are read; give a folder or hub id as source")
        model, tokenizer = source.to(device=device, dtype=dtype), None
    else:
        model, tokenizer = _read_model(source, quantization, dtype, device)
    if isinstance(lora, Path) or (isinstance(lora, str) and Path(lora).is_dir()):
        model = read_adapter(model, Path(lora))
    elif lora is not None:
        model = _with_lora(model, lora, seed, frozen_prompt=adapter_scope != "all")
    return Policy(
        model,
        tokenizer,
        reference=reference,
        vocab_size=vocab_size,
        max_positions=max_positions,
        adapter_scope=adapter_scope,
    )


def _check_device(device: str | torch.device | None) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidInputError(f"device={device!r} cannot be used here: {error}") from None


def named_source(source: str | Path) -> str | Path:
    """The folder of a model that this package knows by name; anything else as it is."""
    if str(source) == DEMO_MODEL:
        return gemma3_270m_path()
    return bundled_model_path(str(source)) if str(source) in BUNDLED_MODELS else source


def _read_model(
    source: str | Path, quantization: str | None, dtype: torch.dtype | None, device: str | torch.device | None
) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM

    if not isinstance(source, str | Path) or not str(source):
        raise InvalidInputError(f"source={source!r} is neither a model nor a folder or hub id")
    source = named_source(source)
    options: dict[str, Any] = {"dtype": dtype or "auto"}
    if quantization is not None:
        options["quantization_config"] = nf4_config(dtype)
        options["device_map"] = device or "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"source={str(source)!r} is no readable model folder, no hub id that can be reached from here, and not "
            f"{DEMO_MODEL!r} or a bundled model ({', '.join(BUNDLED_MODELS)}): {first_line(error)}"
        ) from error
    if quantization is None and device is not None:
        model = model.to(device)
    return model.eval(), _read_tokenizer(source)


def _read_tokenizer(source: str | Path) -> Any:
    """None for a folder without one: transformers would make up an empty one, which reads every text as nothing."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"source={str(source)!r}: its tokenizer cannot be read: {first_line(error)}") from error


def _with_lora(model: nn.Module, lora: Any, seed: int, *, frozen_prompt: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    if hasattr(model, "peft_config"):
        raise InvalidInputError("lora: the model has an adapter already; leave lora=None to train that one")
    try:
        is_config = isinstance(lora, LoraConfig)
        config = lora if is_config else LoraConfig(task_type="CAUSAL_LM", **_lora_fields(model, lora, frozen_prompt))
        with torch.random.fork_rng(devices=[]), untranslated_names(), warnings.catch_warnings():
            # peft 0.21 asks transformers 5.24 by a name that is to go; nothing that a user of either could change
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
            torch.manual_seed(seed)
            return get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"lora={lora!r}: {error}") from error


def _lora_fields(model: nn.Module, lora: int | Mapping[str, Any], frozen_prompt: bool) -> dict[str, Any]:
    if isinstance(lora, bool) or not isinstance(lora, int | Mapping):
        raise TypeError(
            "give a rank, a mapping of peft.LoraConfig fields, a LoraConfig or the folder of a saved adapter"
        )
    fields: dict[str, Any] = {"r": lora} if isinstance(lora, int) else dict(lora)
    fields.setdefault("lora_alpha", 2 * fields.get("r", 8))
    left_out = adapter_for(model).applied_to_prompt_rows if frozen_prompt else ()
    fields.setdefault("target_modules", [n for n in _decoder_linears(model) if n.rsplit(".", 1)[-1] not in left_out])
    return fields


def _decoder_linears(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in names if "indexer" not in name.split(".") and not name.endswith("lm_head")]
