"""A policy: a supported model, how it is run, which weights it has, and what its reference is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from workbench.architectures import Adapter, adapter_for
from workbench.errors import InvalidInputError, UnsupportedModelError
from workbench.lora import (
    ADAPTER_SCOPES,
    adapter_layers,
    adapter_selection,
    changes_base,
    check_frozen_prompt,
    is_adapter_parameter,
    peft_model,
    rewritten_by_forward,
    selected_adapter,
)
from workbench.ops.logprobs import Head
from workbench.quantization import differentiable_quantized_layers, unquantized_weights


class Policy:
    """Wraps a transformers or PEFT (LoRA) causal LM for capture, scoring, sampling and replay.

    model: left as found: training flags, adapter selection and attention implementation are restored after every call.
    tokenizer: kept for the caller's convenience; the engine works on ids.
    reference: the policy that the KL term compares with. None: for a PEFT model the base model (adapter off), else
        none.
        "base": the same, said aloud. Another string: the name of a loaded adapter of the same PEFT model.
        A model or Policy: a frozen copy.
    vocab_size: true vocabulary size when the head has extra padding columns; log-probabilities are normalised over the
        first `vocab_size` ids only. Default: the configuration's.
    max_positions: lifts (or lowers) the configuration's max_position_embeddings limit.
    adapter_scope: where a LoRA adapter acts. "all": everywhere. "response" (prefix-frozen): off at every prompt
        position, so the first response token is the base model's choice. "replay": off at the captured positions, on
        from the last prompt token, whose logits score the first response token. In the last two the resident state
        depends on the base weights only: it never goes stale, and the gradient stops at the boundary by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        reference: str | nn.Module | Policy | None = None,
        vocab_size: int | None = None,
        max_positions: int | None = None,
        adapter_scope: str = "all",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(f"a policy wraps a transformers or PEFT model, not a {type(model).__name__}")
        if adapter_scope not in ADAPTER_SCOPES:
            raise InvalidInputError(f"adapter_scope={adapter_scope!r} is not one of {', '.join(ADAPTER_SCOPES)}")
        self.adapter_scope = adapter_scope
        self._peft = peft_model(model)
        _require_differentiable_weights(model)
        self.adapter: Adapter = adapter_for(self._peft.get_base_model() if self._peft is not None else model)
        if self.frozen_prompt:
            check_frozen_prompt(model, adapter_scope, self.adapter.applied_to_prompt_rows)
        self.vocab_size = self._true_vocab_size(vocab_size)
        if max_positions is not None and not _is_size(max_positions):
            raise InvalidInputError(f"max_positions={max_positions!r} must be >= 1, a whole number")
        self.max_positions = self.adapter.max_positions if max_positions is None else max_positions
        self.state_key: object = object()
        self._adapter_name: str | None = None  # None: whatever adapter is active; "base": adapters off
        self._weights_of: Policy = self
        self._weight_version = self._base_version = 0
        self._fingerprint = self._current_fingerprint()
        self._reference = self._resolve_reference(reference)

    @property
    def weight_version(self) -> int:
        """Counts changes of the weights, whoever made them: in-place writes and replaced tensors are noticed.

        torch does not count writes through `parameter.data`; after such a write call `note_weight_change`
        (`update_step` does, whatever its optimizer).
        """
        self._weights_of._notice_changes()
        return self._weights_of._weight_version

    @property
    def state_version(self) -> int:
        """Version of the weights that a resident state depends on: base weights only if the prompt is frozen."""
        self._weights_of._notice_changes()
        return self._weights_of._base_version if self.frozen_prompt else self._weights_of._weight_version

    def note_weight_change(self, *, trainable_only: bool = False) -> None:
        """Count a change of weights that nothing shows: a write through `parameter.data`, or to a buffer.

        trainable_only: nothing but trainable parameters was written, as by an optimizer.
        """
        owner = self._weights_of
        owner._weight_version += 1
        owner._base_version += not (trainable_only and self.frozen_prompt)

    def _notice_changes(self) -> None:
        fingerprint = self._current_fingerprint()
        if fingerprint != self._fingerprint:
            self._base_version += fingerprint[0] != self._fingerprint[0]
            self._fingerprint = fingerprint
            self._weight_version += 1

    @property
    def frozen_prompt(self) -> bool:
        """Are the captured prompt positions the base model's, whatever the adapter?"""
        return self.adapter_scope != "all"

    @property
    def frozen_boundary(self) -> bool:
        """Is the last prompt token, which scores the first response token, the base model's too?"""
        return self.adapter_scope == "response"

    @property
    def reference(self) -> Policy | None:
        """The reference policy; it captures its own prefix, so it is the reference model's full forward."""
        return self._reference

    @property
    def device(self) -> torch.device:
        return self.adapter.base.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.adapter.base.norm.weight.dtype

    def moving_base_parameters(self) -> list[str]:
        """Trainable parameters that an adapter-off reference shares with the policy, so that it would move with it."""
        if self._reference is None or self._reference._weights_of is not self:
            return []
        return [name for name, _ in self.trainable_parameters() if not is_adapter_parameter(name)]

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def unquantized_weights(self) -> dict[str, int]:
        """Bytes of each matrix that quantisation left alone, by name; empty for a model that is not quantised."""
        return unquantized_weights(self.model)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Every end-of-sequence id that the model's generation or model configuration names."""
        causal_lm = self.adapter.causal_lm
        found: list[int] = []
        for config in (getattr(causal_lm, "generation_config", None), causal_lm.config):
            ids = getattr(config, "eos_token_id", None)
            found += ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
        return tuple(dict.fromkeys(int(i) for i in found))

    @property
    def head(self) -> Head:
        """The language-model head over the true vocabulary."""
        return replace(self.adapter.head(), vocab_size=self.vocab_size)

    @contextmanager
    def active(self, *, decoding: bool = False) -> Iterator[None]:
        """Run the model the engine's way (dropout off, paged attention, this policy's adapter); restore on exit.

        On a CPU results too small for a normal number count as 0, in the thread that calls.

        decoding: single-token kernels may be used; they need no gradient and need not repeat what replay computes.
        """
        with ExitStack() as stack:
            _require_differentiable_weights(self.model)
            if self.frozen_prompt:
                check_frozen_prompt(self.model, self.adapter_scope, self.adapter.applied_to_prompt_rows)
            stack.enter_context(_flushed_subnormals())
            stack.enter_context(self.adapter.kernels(decoding=decoding))
            stack.enter_context(_evaluation_mode(self.model))
            stack.enter_context(differentiable_quantized_layers(self.model))
            stack.enter_context(_implementations(self.adapter, self.dtype))
            if self._peft is not None and self._adapter_name is not None:
                stack.enter_context(selected_adapter(self._peft, self._adapter_name))
            yield

    @contextmanager
    def at_prompt(self) -> Iterator[None]:
        """Inside `active()`: run captured prompt positions, which the adapter may not touch."""
        with selected_adapter(self._peft, "base") if self.frozen_prompt else nullcontext():
            yield

    @contextmanager
    def at_boundary(self) -> Iterator[None]:
        """Inside `active()`: run the last prompt token apart from the response, as a frozen boundary needs."""
        with selected_adapter(self._peft, "base") if self.frozen_boundary else nullcontext():
            yield

    def _true_vocab_size(self, given: int | None) -> int:
        size = self.adapter.vocab_size if given is None else given
        columns = getattr(self.adapter.causal_lm.lm_head, "out_features", self.adapter.vocab_size)
        if not _is_size(size) or size > columns:
            raise InvalidInputError(f"vocab_size={given!r} must be between 1 and the head's {columns} columns")
        return size

    def _resolve_reference(self, reference: str | nn.Module | Policy | None) -> Policy | None:
        if isinstance(reference, nn.Module):
            reference = Policy(reference, self.tokenizer, vocab_size=self.vocab_size, max_positions=self.max_positions)
        if isinstance(reference, Policy):
            self._require_other_weights(reference)
            return reference
        if reference is not None and not isinstance(reference, str):
            raise InvalidInputError(f"reference is a {type(reference).__name__}; give a name, a model or None")
        if self._peft is None:
            if reference is not None:
                raise InvalidInputError(
                    f"reference={reference!r}: a name selects an adapter of a PEFT model, and this model is none; "
                    "give a frozen copy of the model instead"
                )
            return None
        changed = [c.init_lora_weights for c in self._peft.peft_config.values() if changes_base(c.init_lora_weights)]
        if changed and reference in (None, "base"):
            if reference is None:
                return None
            raise InvalidInputError(
                f"reference='base': init_lora_weights={changed[0]!r} moved part of the base weights into the adapter, "
                "so the base alone is not the model that training began with; give a frozen copy of that model"
            )
        name = "base" if reference is None else reference
        if name != "base" and name not in self._peft.peft_config:
            raise InvalidInputError(
                f"reference={name!r} is not a loaded adapter; loaded: {', '.join(self._peft.peft_config)} (or 'base')"
            )
        return self._view(name)

    def _require_other_weights(self, reference: Policy) -> None:
        own = {id(p) for _, p in self.trainable_parameters()}
        if any(id(p) in own for p in reference.model.parameters()):
            raise InvalidInputError(
                "reference shares trainable parameters with the policy and would move with every step; give a frozen "
                "copy (copy.deepcopy)"
            )
        if reference.vocab_size != self.vocab_size:
            raise InvalidInputError(
                f"reference has a vocabulary of {reference.vocab_size} ids, the policy one of {self.vocab_size}"
            )

    def _view(self, adapter_name: str) -> Policy:
        """The same weights under another adapter selection, with resident states of its own.

        Where the prompt is frozen its state is the base model's under every selection: the view shares the policy's.
        """
        view = object.__new__(Policy)
        view.__dict__.update(self.__dict__)
        view.state_key = self.state_key if self.frozen_prompt else object()
        view._adapter_name = adapter_name
        view._weights_of = self
        view._reference = None
        return view

    def _current_fingerprint(self) -> tuple[Any, ...]:
        """(base weights, adapter weights, which adapters act)."""
        rewritten = rewritten_by_forward(self.model)
        base: list[tuple[int, int]] = []
        adapter: list[tuple[int, int]] = []
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if id(tensor) not in rewritten:
                (adapter if is_adapter_parameter(name) else base).append((tensor._version, tensor.data_ptr()))
        return base, adapter, adapter_selection(self.model)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require_differentiable_weights(model: nn.Module) -> None:
    if any(layer.merged_adapters for layer in adapter_layers(model)):
        raise UnsupportedModelError(
            "an adapter is merged into the base weights, where it takes no gradient and the base is no reference; "
            "call unmerge_adapter() first, or merge_and_unload() and make a new Policy"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise UnsupportedModelError(f"{name} is an inference tensor; load the model outside inference_mode")


@cache
def _make_threads(count: int) -> None:
    """Threads take the flag over from whoever makes them, and keep it: have them made, once, before it is set."""
    if count > 1:
        torch.ones(1 << 17, device="cpu").add_(1.0)


@contextmanager
def _flushed_subnormals() -> Iterator[None]:
    """Results below the smallest normal number (1e-38 in float32) count as 0 in this thread for the duration.

    What passes through a strong decay, a recurrent state or its gradient, ends there, and a core computes with such
    numbers up to fifteen times slower: a step of a Gated DeltaNet hybrid took 1.6 times as long.
    """
    _make_threads(torch.get_num_threads())
    before = bool(torch.tensor(1e-39, dtype=torch.float32, device="cpu") * 0.5 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """eval() for the duration: dropout off in every pass, gradients unaffected."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _implementations(adapter: Adapter, dtype: torch.dtype) -> Iterator[None]:
    """Select paged attention for stock modules, and an experts kernel that exists in float64."""
    config = adapter.config
    before = config._attn_implementation, config._experts_implementation
    if adapter.attention_name is not None:
        config._attn_implementation = adapter.attention_name
    if dtype == torch.float64:  # the default, grouped_mm, refuses it
        config._experts_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation, config._experts_implementation = before
