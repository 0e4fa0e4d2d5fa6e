"""What others do with the same model, data and loss. Every mode leaves the same gradient in `.grad`.

All peers get the Gated DeltaNet kernel of this repository: with transformers' reference kernel, whose backward is
quadratic in the sequence, the comparison would flatter us. All run with subnormal numbers flushed (child.py), too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.benchmarks.problem import VOCAB
from workbench import Policy, update_step
from workbench.ops.gated_delta import chunk_gated_delta_rule

Step = Callable[[Any, Tensor, list[Tensor], list[float]], None]


def repair(model: Any) -> None:
    """Give transformers' model this repository's kernel."""
    modeling = sys.modules[type(model).__module__]
    if hasattr(modeling, "torch_chunk_gated_delta_rule"):
        modeling.torch_chunk_gated_delta_rule = chunk_gated_delta_rule


def _checkpointing(model: Any) -> None:
    model.train()  # the models have no dropout
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _loss(logprobs: Tensor, advantage: float, group: int) -> Tensor:
    return -(advantage * torch.exp(logprobs - logprobs.detach())).mean() / group


def _chosen(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, targets[..., None])[..., 0]


# ---------------------------------------------------------------- whole sequences


def serial(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    """One full-sequence graph per member."""
    for response, advantage in zip(responses, advantages, strict=True):
        ids = torch.cat([prompt, response])[None]
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
        _loss(_chosen(logits, response), advantage, len(responses)).backward()


def serial_checkpointed(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    _checkpointing(model)
    serial(model, prompt, responses, advantages)


def batched(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    """The group as one batch of equal lengths."""
    ids = torch.stack([torch.cat([prompt, response]) for response in responses])
    targets = torch.stack(responses)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=targets.shape[1] + 1).logits[:, :-1]
    losses = [_loss(lp, a, len(responses)) for lp, a in zip(_chosen(logits, targets), advantages, strict=True)]
    torch.stack(losses).sum().backward()


def batched_checkpointed(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    _checkpointing(model)
    batched(model, prompt, responses, advantages)


def trl(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    """TRL's GRPOTrainer: its own log-prob path, with the group as one batch."""
    trainer = model.trl_trainer  # built by prepare_trl before the step: its cost is not measured
    ids = torch.stack([torch.cat([prompt, response]) for response in responses])
    targets = torch.stack(responses)
    logprobs = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, torch.ones_like(ids), targets.shape[1], batch_size=len(responses)
    )[0]
    losses = [_loss(lp, a, len(responses)) for lp, a in zip(logprobs, advantages, strict=True)]
    torch.stack(losses).sum().backward()


def trl_checkpointed(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    _checkpointing(model)
    trl(model, prompt, responses, advantages)


def prepare_trl(model: Any) -> None:
    """Put a GRPOTrainer around the model, kept as model.trl_trainer."""
    import tempfile

    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1", unk_token="w0"
    )
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=model.device.type == "cpu",
        bf16=False,
        num_generations=2,
        per_device_train_batch_size=2,
        temperature=1.0,
        gradient_checkpointing=False,
        report_to=[],
    )
    model.trl_trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["w5", "w6"]}),
        processing_class=tokenizer,
    )


# ---------------------------------------------------------------- the prompt once, in one graph


class _GraphCache:
    """A layer's cache that concatenates under autograd and hands the new state out."""

    def __init__(self, state: Sequence[Tensor]) -> None:
        self.state = list(state)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.state:
            batch = keys.shape[0]
            keys = torch.cat([self.state[0].expand(batch, -1, -1, -1), keys], dim=2)
            values = torch.cat([self.state[1].expand(batch, -1, -1, -1), values], dim=2)
        self.state = [keys, values]
        return keys, values

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | None:
        return self.state[0] if self.state else None

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        return self.state[1] if self.state else None

    def is_recording_past(self, *_: Any) -> bool:
        return True

    def update_conv_state(self, x: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
        full = torch.cat([self.state[0].expand(x.shape[0], -1, -1), x], dim=-1) if self.state else x
        self._tail = full[..., -(conv_kernel_size - 1) :]
        return full

    def update_recurrent_state(self, state: Tensor, *_: Any, **__: Any) -> Tensor:
        self.state = [self._tail, state]
        return state


def _through_layers(
    model: Any, ids: Tensor, start: int, states: list[Sequence[Tensor]], checkpointed: bool
) -> tuple[Tensor, list[Sequence[Tensor]]]:
    base = model.model
    hidden = base.embed_tokens(ids)
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    rotary = base.rotary_emb(hidden, positions)
    mask = None
    if start:
        mask = torch.ones(ids.shape[1], start + ids.shape[1], dtype=torch.bool, device=ids.device)
        mask = mask.tril(start)[None, None]
    new_states = []
    for layer, state in zip(base.layers, states, strict=True):
        attends = getattr(layer, "block_type", "full_attention") == "full_attention"

        def run(hidden: Tensor, *state: Tensor, layer: Any = layer, attends: bool = attends) -> tuple[Tensor, ...]:
            cache = _GraphCache(state)
            out = layer(
                hidden,
                position_embeddings=rotary,
                attention_mask=mask if attends else None,
                cache=cache,
            )
            return out, *cache.state

        hidden, *new = checkpoint(run, hidden, *state, use_reentrant=False) if checkpointed else run(hidden, *state)
        new_states.append(new)
    return hidden, new_states


def _shared(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float], checkpointed: bool) -> None:
    empty: list[Sequence[Tensor]] = [() for _ in model.model.layers]
    _, states = _through_layers(model, prompt[None, :-1], 0, empty, checkpointed)
    targets = torch.stack(responses)
    inputs = torch.cat([prompt[-1:].expand(len(responses), 1), targets[:, :-1]], dim=1)
    hidden, _ = _through_layers(model, inputs, len(prompt) - 1, states, checkpointed)
    del states
    logits = model.lm_head(model.model.norm(hidden))
    losses = [_loss(lp, a, len(responses)) for lp, a in zip(_chosen(logits, targets), advantages, strict=True)]
    torch.stack(losses).sum().backward()


def shared_prefix(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    """One autograd pass over the prompt, then the group as a batch on top of it."""
    _shared(model, prompt, responses, advantages, checkpointed=False)


def shared_prefix_checkpointed(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    _shared(model, prompt, responses, advantages, checkpointed=True)


# ---------------------------------------------------------------- PrefixGrouper


def prefix_grouper(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    """The prompt and all responses as one row; attention splits it (its own code, over torch's fused attention)."""
    grouper, count, length = (
        model.prefix_grouper(len(prompt), [len(r) for r in responses]),
        len(prompt),
        len(responses[0]),
    )
    ids = torch.cat([prompt, *responses])[None]
    suffix = torch.arange(count, count + length)
    positions = torch.cat([torch.arange(count), *[suffix] * len(responses)])[None].to(ids.device)
    hidden = model.model(
        input_ids=ids,
        position_ids=positions,
        use_cache=False,
        prefix_grouper=grouper,
    ).last_hidden_state[0]
    last, *members = hidden[count - 1 :].split([1, *[length] * len(responses)])
    losses = []
    for member, response, advantage in zip(members, responses, advantages, strict=True):
        logits = model.lm_head(torch.cat([last, member[:-1]]))
        losses.append(_loss(_chosen(logits, response), advantage, len(responses)))
    torch.stack(losses).sum().backward()


def prefix_grouper_checkpointed(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
    _checkpointing(model)
    prefix_grouper(model, prompt, responses, advantages)


def prepare_prefix_grouper(model: Any) -> None:
    from prefix_grouper import PrefixGrouper
    from prefix_grouper.forward import AttentionForward
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, *, prefix_grouper: PrefixGrouper,
        scaling: float, **__: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """What its own registration does for FlashAttention, which takes a mask of padding (none here) and is causal
        from the lower right."""

        def fused(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
            tokens, rows = q.shape[2], k.shape[2]
            mask = None if tokens == rows else torch.ones(tokens, rows, dtype=torch.bool).tril(rows - tokens)
            mask = None if mask is None else mask[None, None].to(q.device)
            return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling)[0]

        return AttentionForward(fused)(prefix_grouper, query, key, value), None

    AttentionInterface.register("prefix_grouper_sdpa", attention)
    model.config._attn_implementation = "prefix_grouper_sdpa"
    model.prefix_grouper = lambda prompt, responses: PrefixGrouper([[prompt, *responses]])


# ---------------------------------------------------------------- this repository


def _ours(**options: Any) -> Step:
    def step(model: Any, prompt: Tensor, responses: list[Tensor], advantages: list[float]) -> None:
        update_step(Policy(model), prompt, responses, advantages=advantages, measure_memory=False, **options)

    return step


OPTIONS: dict[str, dict[str, Any]] = {
    "full, chunk 512, layer checkpoints": {"chunk_tokens": 512, "checkpoint_layers": True},
    "full, chunk 1024": {"chunk_tokens": 1024},
    "response_only, chunk 512": {"chunk_tokens": 512, "gradient_scope": "response_only"},
}
MODES: dict[str, Step] = {
    "serial": serial,
    "serial + checkpointing": serial_checkpointed,
    "batched": batched,
    "batched + checkpointing": batched_checkpointed,
    "TRL": trl,
    "TRL + checkpointing": trl_checkpointed,
    "shared prefix": shared_prefix,
    "shared prefix + checkpointing": shared_prefix_checkpointed,
    "PrefixGrouper": prefix_grouper,
    "PrefixGrouper + checkpointing": prefix_grouper_checkpointed,
    **{mode: _ours(**options) for mode, options in OPTIONS.items()},
}


def prepare(model: Any, mode: str) -> None:
    """What a mode needs before its step; none of it is measured."""
    repair(model)
    if mode.startswith("TRL"):
        prepare_trl(model)
    if mode.startswith("PrefixGrouper"):
        prepare_prefix_grouper(model)
