"""What a plan is asked for: one frozen record, refused with the numbers when it cannot be."""

from __future__ import annotations

import random
from dataclasses import dataclass

from workbench.errors import InvalidInputError
from workbench.planner.shapes import ModelShape
from workbench.types import GradientScope, Sampled, Tail

# The engine's own defaults, which stand to the right of the planner (tests/test_planner.py compares them).
CHUNK_TOKENS = 1024
BLOCK_TOKENS = 2048
HEAD_ROWS = 64

WEIGHT_BYTES = {"nf4": 2, "bf16": 2, "fp32": 4}  # of what is not quantised, and of activations
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Request:
    """One step of one group on one machine.

    positions: prompt plus one response (the longest). response_tokens: of one response. group_size: responses.
    context_parallel: ranks that share every chunk's tokens and rows; expert_parallel: ranks that share the experts,
        the same ranks, so it divides context_parallel.
    gradient_scope: "response_only", "full", Tail(chunks) or Sampled(fraction, seed).
    adapter_scope: "all", or "response" (prefix-frozen: adapters off at prompt positions, response_only is complete).
    weights: storage of the base model, "nf4", "bf16" or "fp32"; activations are bf16 for the first two.
    training: "lora" (float32 adapters of lora_rank on a frozen base, as PEFT makes them) or "full".
    placement: where rows, their gradients and boundary carries live: "device" or "host".
    checkpoint_layers: keep layer inputs and attention outputs only, rebuild one layer's graph at a time; implied by
        placement="host".
    quantize_experts: with "nf4": are stacked expert tensors quantised too (a Linear-only quantiser skips them)?
    optimizer: "adamw" or "none" (gradients are left in place).
    num_gpus: a check only: must be a multiple of context_parallel.
    """

    positions: int
    group_size: int
    response_tokens: int
    context_parallel: int = 1
    expert_parallel: int = 1
    gradient_scope: GradientScope = "full"
    adapter_scope: str = "all"
    weights: str = "nf4"
    training: str = "lora"
    lora_rank: int = 16
    placement: str = "device"
    chunk_tokens: int = CHUNK_TOKENS
    block_tokens: int = BLOCK_TOKENS
    checkpoint_layers: bool = False
    quantize_experts: bool = True
    optimizer: str = "adamw"
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        for name in ("positions", "group_size", "response_tokens", "context_parallel", "expert_parallel"):
            _need_positive(name, getattr(self, name))
        for name in ("lora_rank", "chunk_tokens", "block_tokens"):
            _need_positive(name, getattr(self, name))
        _need_choice("weights", self.weights, tuple(WEIGHT_BYTES))
        _need_choice("training", self.training, ("lora", "full"))
        _need_choice("placement", self.placement, ("device", "host"))
        _need_choice("optimizer", self.optimizer, ("adamw", "none"))
        _need_choice("adapter_scope", self.adapter_scope, ("all", "response"))
        self._check_scope()
        self._check_degrees()

    def _check_scope(self) -> None:
        scope = self.gradient_scope
        _need(
            scope in ("full", "response_only") or isinstance(scope, Tail | Sampled),
            f"gradient_scope={scope!r} is not one of 'full', 'response_only', Tail(chunks), Sampled(fraction, seed)",
        )
        _need(
            self.adapter_scope == "all" or scope == "response_only",
            f"adapter_scope='response' (prefix-frozen) has no gradient in the prompt: gradient_scope={scope!r} would "
            "walk it for nothing; use 'response_only'",
        )
        _need(
            self.adapter_scope == "all" or self.training == "lora",
            "adapter_scope='response' switches an adapter off at prompt positions; training='full' has none",
        )
        _need(
            self.weights != "nf4" or self.training == "lora",
            "training='full' cannot update nf4 weights; use weights='bf16' or 'fp32', or training='lora'",
        )

    def _check_degrees(self) -> None:
        prompt = self.positions - self.response_tokens
        _need(
            prompt >= 1,
            f"prompt = positions - response_tokens = {self.positions:,} - {self.response_tokens:,} = {prompt:,}; "
            "a prompt needs at least one token",
        )
        cp, ep = self.context_parallel, self.expert_parallel
        _need(
            cp <= self.chunk_tokens,
            f"tokens per rank = chunk_tokens / context_parallel = {self.chunk_tokens:,} / {cp:,} = "
            f"{self.chunk_tokens / cp:.2f} < 1; use larger chunks or fewer ranks",
        )
        _need(
            cp % ep == 0,
            f"expert_parallel divides context_parallel (the same ranks hold both): {cp:,} / {ep:,} = {cp / ep:g}",
        )
        gpus = self.num_gpus
        if gpus is not None:
            _need_positive("num_gpus", gpus)
        _need(
            gpus is None or (gpus >= cp and gpus % cp == 0),
            f"num_gpus = context_parallel x replicas: {gpus} / {cp} = {(gpus or 0) / cp:g}, not a whole number >= 1",
        )

    def check_model(self, shape: ModelShape) -> None:
        """What depends on the model as well."""
        experts, ep = shape.num_experts, self.expert_parallel
        _need(
            ep == 1 or ep <= experts,
            f"experts per rank = num_experts / expert_parallel = {experts} / {ep} = {experts / ep:g} < 1"
            + ("" if experts else f": {shape.name} has no routed experts"),
        )

    # ------------------------------------------------------------ what follows from the numbers

    @property
    def prompt_tokens(self) -> int:
        return self.positions - self.response_tokens

    @property
    def resident_tokens(self) -> int:
        """Captured positions: the last prompt token is replayed with every response."""
        return self.prompt_tokens - 1

    @property
    def num_chunks(self) -> int:
        return -(-self.resident_tokens // self.chunk_tokens)

    @property
    def num_blocks(self) -> int:
        return -(-self.response_tokens // self.block_tokens)

    @property
    def largest_chunk(self) -> int:
        return min(self.chunk_tokens, self.resident_tokens)

    @property
    def largest_block(self) -> int:
        return min(self.block_tokens, self.response_tokens)

    @property
    def keeps_boundaries(self) -> bool:
        """Every scope but response_only keeps the carry at every chunk boundary."""
        return self.gradient_scope != "response_only"

    @property
    def walked_chunks(self) -> tuple[int, ...]:
        """Indices of the prompt chunks that are walked; Sampled draws as the engine does."""
        scope, chunks = self.gradient_scope, self.num_chunks
        if scope == "full":
            return tuple(range(chunks))
        if isinstance(scope, Tail):
            return tuple(range(max(0, chunks - scope.chunks), chunks))
        if isinstance(scope, Sampled):
            draw = random.Random(scope.seed)
            return tuple(index for index in range(chunks) if draw.random() < scope.fraction)
        return ()

    def chunk_length(self, index: int) -> int:
        return min(self.chunk_tokens, self.resident_tokens - index * self.chunk_tokens)

    @property
    def rebuilds_layers(self) -> bool:
        return self.checkpoint_layers or self.placement == "host"

    @property
    def compute_bytes(self) -> int:
        """Of one activation or row element."""
        return WEIGHT_BYTES[self.weights]

    @property
    def trained_bytes(self) -> int:
        """Of one trained parameter, of its gradient, and of each of its two Adam moments."""
        return FP32_BYTES if self.training == "lora" else WEIGHT_BYTES[self.weights]

    def rank_tokens(self, tokens: int) -> int:
        """Most tokens that one rank owns of `tokens`: each chunk is split evenly, the first ranks take what is over."""
        whole, rest = divmod(tokens, self.chunk_tokens)
        return whole * -(-self.chunk_tokens // self.context_parallel) + -(-rest // self.context_parallel)


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidInputError(f"plan: {message}")


LARGEST = 2**48  # beyond any machine, and small enough for bytes and operations to stay exact


def _need_positive(name: str, value: object) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _need(whole and 1 <= value <= LARGEST, f"{name}={value!r} must be >= 1 and at most 2**48")  # type: ignore[operator]


def _need_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    _need(value in choices, f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")
