"""What notebooks/20_architectures.ipynb does between its prose: real configurations scaled down, and what they hold."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from workbench import Policy, ResidentState, capture_prompt
from workbench.errors import InvalidInputError
from workbench.memory import DEFAULT_LEDGER, MemoryMeter
from workbench.planner import ModelShape, catalogue, find_model
from workbench.planner.shapes import Layer
from workbench.state.pages import total_nbytes

VOCABULARY = 512
MB, GB, MIB = 1e6, 1e9, 2**20

# Fields of a configuration and what they are divided by: heads and the width of a head by 4, hence everything as wide
# as all heads by 16. Layer patterns, kernels and ratios stay, so every kind of layer keeps its form.
_DIVIDED = {
    4: (
        "num_attention_heads", "num_key_value_heads", "index_n_heads", "linear_num_key_heads", "linear_num_value_heads",
        "head_dim", "linear_key_head_dim", "linear_value_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "kv_lora_rank", "index_head_dim", "num_experts_per_tok",
    ),
    16: (
        "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank",
        "index_topk", "sliding_window",
    ),
    32: ("n_routed_experts", "num_experts"),
}  # fmt: skip

KINDS = {
    "full_attention": ("full attention", "keys and values"),
    "sliding_attention": ("sliding-window attention", "keys and values, of a window only"),
    "gated_delta": ("Gated DeltaNet", "recurrent state and convolution tail, whatever the length"),
    "latent_indexed": ("latent attention with an index", "latent with rotary key, index key"),
    "latent_shared": ("latent attention, shared index", "latent with rotary key"),
}


class ArchitectureParameters(BaseModel):
    """The parameters of notebooks/20_architectures.ipynb; an unknown name, or a value that does not fit, is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hybrid: str
    sparse: str
    num_layers: int = Field(ge=4)  # a pattern of layers has at least four
    prompt_tokens: tuple[PositiveInt, ...] = Field(min_length=2)
    chunk_tokens: PositiveInt
    seed: int = Field(ge=0)


@dataclass(frozen=True)
class Family:
    """One model: its full shape, and the same configuration cut and scaled down, as a shape and as a policy."""

    name: str
    shape: ModelShape
    small_shape: ModelShape
    policy: Policy


def open_family(name: str, parameters: ArchitectureParameters) -> Family:
    """The catalogue's configuration at full size, and a random float32 model of its first layers, scaled down."""
    transformers.logging.set_verbosity_error()  # of kernels that only a GPU has
    fields = _scaled_fields(name, parameters.num_layers)
    small_shape = find_model(fields)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(parameters.seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Family(name, find_model(name), small_shape, Policy(model.eval()))


def _scaled_fields(name: str, num_layers: int) -> dict[str, Any]:
    fields = _catalogue_fields(name)
    divided = {key: max(1, fields[key] // by) for by, keys in _DIVIDED.items() for key in keys if fields.get(key)}
    layer_lists = {key: value[:num_layers] for key, value in fields.items() if isinstance(value, list)}
    return fields | divided | layer_lists | {"num_hidden_layers": num_layers, "vocab_size": VOCABULARY}


def _catalogue_fields(name: str) -> dict[str, Any]:
    for key, entry in catalogue("models").items():
        if name == key or name in entry.get("aliases", ()):
            return dict(entry["config"])
    raise InvalidInputError(f"{name!r} is not in the model catalogue; there are: {', '.join(catalogue('models'))}")


def small_state(family: Family, parameters: ArchitectureParameters) -> ResidentState:
    """The first prompt length, captured."""
    prompt = _prompt(parameters.prompt_tokens[0], parameters)
    return capture_prompt(family.policy, prompt, chunk_tokens=parameters.chunk_tokens)


def _prompt(tokens: int, parameters: ArchitectureParameters) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(parameters.seed))


# ---------------------------------------------------------------- what is resident, by kind of layer


@dataclass(frozen=True)
class KindBytes:
    """One kind of layer. measured_*: of one small layer, from the captured state; formula_*: the planner's, for it.

    full_*: the planner's at full size, in bfloat16 (recurrent states in float32).
    """

    kind: str
    num_layers: int
    num_small_layers: int
    measured_row_bytes: float
    formula_row_bytes: int
    measured_carry_bytes: int
    formula_carry_bytes: int
    full_row_bytes: int
    full_carry_bytes: int

    @property
    def agrees(self) -> bool:
        """Is what was measured what the formula says, to the byte?"""
        return (self.measured_row_bytes, self.measured_carry_bytes) == (
            self.formula_row_bytes,
            self.formula_carry_bytes,
        )


def bytes_by_kind(family: Family, state: ResidentState) -> list[KindBytes]:
    """Every kind of layer of the family, in order of first appearance in the full model."""
    full = {layer.mixer.kind: layer for layer in family.shape.layers}
    small = {layer.mixer.kind: index for index, layer in enumerate(family.small_shape.layers)}
    return [
        KindBytes(
            kind=kind,
            num_layers=_count(family.shape, kind),
            num_small_layers=_count(family.small_shape, kind),
            measured_row_bytes=_row_bytes(state, small[kind]) / state.positions,
            formula_row_bytes=4 * family.small_shape.layers[small[kind]].mixer.row_elements,
            measured_carry_bytes=total_nbytes(state.carry_at(state.positions)[small[kind]].values()),
            formula_carry_bytes=_carry_bytes(family.small_shape.layers[small[kind]], 4),
            full_row_bytes=2 * layer.mixer.row_elements,
            full_carry_bytes=_carry_bytes(layer, 2),
        )
        for kind, layer in full.items()
    ]


def _count(shape: ModelShape, kind: str) -> int:
    return sum(layer.mixer.kind == kind for layer in shape.layers)


def _row_bytes(state: ResidentState, layer: int) -> int:
    return sum(total_nbytes(page.layers[layer].values()) for page in state.pages)


def _carry_bytes(layer: Layer, element_bytes: int) -> int:
    return 4 * layer.mixer.carry_fp32_elements + element_bytes * layer.mixer.carry_elements


def kind_rows(kinds: Sequence[KindBytes]) -> list[list[Any]]:
    """kind, what stays, layers, bytes per token and layer: measured, formula, full size; carry of a layer: the same."""
    return [
        [
            *KINDS[k.kind], k.num_layers, k.measured_row_bytes, k.formula_row_bytes, k.full_row_bytes,
            k.measured_carry_bytes, k.formula_carry_bytes, k.full_carry_bytes,
        ]
        for k in kinds
    ]  # fmt: skip


KIND_HEADINGS = (
    "kind of layer", "what stays of a prompt", "layers, full size", "B per token, measured", "formula", "full size",
    "carry B, measured", "formula", "full size",
)  # fmt: skip


# ---------------------------------------------------------------- what grows with the prompt


@dataclass(frozen=True)
class Growth:
    """One capture. rows, carry, chunk_carries: bytes; workspace: of everything else, at its peak; seconds: CPU time."""

    positions: int
    rows: int
    carry: int
    chunk_carries: int
    workspace: int
    seconds: float

    @property
    def microseconds(self) -> float:
        """Of CPU time, per token."""
        return 1e6 * self.seconds / self.positions


def measure_growth(family: Family, parameters: ArchitectureParameters) -> list[Growth]:
    """One capture for each prompt length."""
    return [_capture(family, tokens, parameters) for tokens in parameters.prompt_tokens]


def _capture(family: Family, tokens: int, parameters: ArchitectureParameters) -> Growth:
    prompt = _prompt(tokens, parameters)
    with MemoryMeter(family.policy.device) as meter:
        started = time.process_time()
        state = capture_prompt(family.policy, prompt, chunk_tokens=parameters.chunk_tokens, meter=meter)
        seconds = time.process_time() - started
    rows, carry = total_nbytes(state.row_tensors()), _boundary_carry_bytes(state)
    workspace = meter.report()[DEFAULT_LEDGER]
    return Growth(state.positions, rows, carry, state.nbytes - rows - carry, workspace, seconds)


def _boundary_carry_bytes(state: ResidentState) -> int:
    return sum(total_nbytes(layer.values()) for layer in state.carry_at(state.positions))


def growth_rows(growth: Sequence[Growth]) -> list[list[Any]]:
    """positions, then MiB of rows, carry, carries at chunk starts and workspace, then CPU microseconds per token."""
    return [
        [g.positions, *(size / MIB for size in (g.rows, g.carry, g.chunk_carries, g.workspace)), g.microseconds]
        for g in growth
    ]  # fmt: skip


GROWTH_HEADINGS = (
    "positions", "rows, MiB", "carry, MiB", "carries at chunk starts, MiB", "workspace, MiB", "CPU us per token",
)  # fmt: skip


# ---------------------------------------------------------------- the catalogue


@dataclass(frozen=True)
class Footprint:
    """One catalogue model in bfloat16: rows per token, carry of a prompt, and a million tokens of it.

    by_kind: bytes per token by kind of layer; windows count in none of it, because their rows do not grow.
    gradient_bytes: float32 gradient pages of one token.
    """

    name: str
    by_kind: Mapping[str, int]
    carry_bytes: int
    gradient_bytes: int

    @property
    def row_bytes(self) -> int:
        return sum(self.by_kind.values())


def footprints() -> list[Footprint]:
    """Every model of the catalogue, the heaviest per token first."""
    found = [_footprint(find_model(name)) for name in catalogue("models")]
    return sorted(found, key=lambda footprint: -footprint.row_bytes)


def _footprint(shape: ModelShape) -> Footprint:
    by_kind: dict[str, int] = {}
    for layer, count in shape.groups:
        if layer.mixer.row_elements and layer.mixer.row_limit is None:
            by_kind[layer.mixer.kind] = by_kind.get(layer.mixer.kind, 0) + 2 * count * layer.mixer.row_elements
    carry = sum(count * _carry_bytes(layer, 2) for layer, count in shape.groups)
    growing = [(layer, count) for layer, count in shape.groups if layer.mixer.row_limit is None]
    return Footprint(shape.name, by_kind, carry, 4 * sum(n * layer.mixer.gradient_elements for layer, n in growing))


def footprint_rows(found: Sequence[Footprint]) -> list[list[Any]]:
    """name, bytes per token, carry in MB, a million tokens in GB: rows, and rows with their float32 gradients."""
    return [
        [f.name, f.row_bytes, f.carry_bytes / MB, f.row_bytes * 1e6 / GB, (f.row_bytes + f.gradient_bytes) * 1e6 / GB]
        for f in found
    ]


FOOTPRINT_HEADINGS = (
    "model", "rows, B per token", "carry, MB", "rows of 1M tokens, GB", "with their gradients, GB",
)  # fmt: skip


def architecture_results(
    parameters: ArchitectureParameters,
    kinds: Mapping[str, Sequence[KindBytes]],
    growth: Mapping[str, Sequence[Growth]],
    found: Sequence[Footprint],
) -> dict[str, Any]:
    """Everything that the notebook measured, as `workbench.records.save_results` takes it."""
    agree = all(kind.agrees for family in kinds.values() for kind in family)
    checks = [
        {"level": 1, "what": "executed", "passed": True},
        {"level": 1, "what": "resident bytes of every kind of layer are the planner's, to the byte", "passed": agree},
    ]
    return {
        "seed": parameters.seed,
        "evidence": {"level": int(agree), "checks": checks},
        "settings": parameters.model_dump(),
        "layer_kinds": kinds,
        "growth": growth,
        "bytes_per_token": {footprint.name: footprint.row_bytes for footprint in found},
    }
