"""The truth that the engine is compared with: the model's own full-sequence forward under conventional autograd.

Nothing here uses the engine, but for the names in `ObjectiveConfig`. Three context managers change transformers for
*both* sides where a comparison needs it:

- `lifted_float32_casts`: transformers casts to float32 inside norms, rotary tables, Gated DeltaNet and routers; in a
  float64 comparison those casts would hide everything below 1e-7, so float64 tensors stay float64.
- `deterministic_index`: the stock sparse-attention indexer leaves ties to `torch.topk`, whose choice depends on the
  shape; here ties go to the lowest position, which is the order the engine promises.
- `detached_prompt`: what mixes tokens (keys and values, convolution inputs, recurrent inputs, latents) is detached at
  prompt positions, which is the definition of the response-only gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import transformers.models.deepseek_v32.modeling_deepseek_v32 as deepseek_v32
import transformers.models.glm_moe_dsa.modeling_glm_moe_dsa as glm_moe_dsa
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen3_5
import transformers.models.qwen3_5_moe.modeling_qwen3_5_moe as qwen3_5_moe
import transformers.models.qwen3_next.modeling_qwen3_next as qwen3_next
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from workbench.config import ObjectiveConfig

Gradients = dict[str, Tensor]


def sequence_logprobs(model: nn.Module, prompt: Tensor, response: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [R] of a response from one full forward of prompt + response, no cache."""
    ids = torch.cat([prompt, response])[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, response[:, None])[:, 0]


def grpo_gradient(
    model: nn.Module, prompt: Tensor, responses: Sequence[Tensor], advantages: Sequence[float]
) -> Gradients:
    """Gradient of -(1/G) sum_i (1/R_i) sum_t A_i exp(logp - stopgrad(logp)): GRPO at ratio 1, by full autograd."""
    model.zero_grad()
    for response, advantage in zip(responses, advantages, strict=True):
        logprobs = sequence_logprobs(model, prompt, response)
        ratio = torch.exp(logprobs - logprobs.detach())
        (-(advantage * ratio).sum() / (len(responses) * len(response))).backward()
    return take_gradients(model)


Member = tuple[Tensor, Tensor, Tensor, float]  # prompt, response, old log-probs, advantage


def objective_gradient(
    model: nn.Module, members: Sequence[Member], config: ObjectiveConfig, reference: nn.Module | None = None
) -> Gradients:
    """The six losses as their papers write them, joint over all members of a step, by full autograd."""
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(len(response) for _, response, _, _ in members)
    for prompt, response, old_logprobs, advantage in members:
        logprobs = sequence_logprobs(model, prompt, response, config.temperature)
        log_ratio = logprobs - old_logprobs
        if config.loss in ("gspo", "luspo"):
            log_ratio = log_ratio.mean().expand(len(response))
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        terms = -torch.minimum(ratio * advantage, clipped * advantage)
        if config.loss == "cispo":
            terms = -ratio.detach().clamp(max=1 + config.clip_high) * advantage * logprobs
        if reference is not None:
            with torch.no_grad():
                ref = sequence_logprobs(reference, prompt, response, config.temperature)
            terms = terms + config.beta * ((ref - logprobs).exp() - (ref - logprobs) - 1)
        weight = {
            "grpo": 1 / (len(members) * len(response)),
            "gspo": 1 / (len(members) * len(response)),
            "dapo": 1 / num_tokens,
            "cispo": 1 / num_tokens,
            "dr_grpo": 1 / (len(members) * (config.max_response_tokens or 1)),
            "luspo": 1 / len(members),
        }[config.loss]
        total = total + weight * terms.sum()
    model.zero_grad()
    total.backward()
    return take_gradients(model)


def take_gradients(model: nn.Module) -> Gradients:
    """The gradients of all parameters that have one, removed from the model."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def relative_l2(found: Gradients, truth: Gradients) -> float:
    """|found - truth| / |truth| over all parameters in float64; one that is missing on a side is zero there."""
    names = found.keys() | truth.keys()
    zero = torch.zeros(())
    difference = sum(float((found.get(n, zero).double() - truth.get(n, zero).double()).square().sum()) for n in names)
    norm = sum(float(g.double().square().sum()) for g in truth.values())
    assert norm > 0.0, "a reference of zeros cannot be compared with"
    return (difference / norm) ** 0.5


@contextmanager
def lifted_float32_casts() -> Iterator[None]:
    """Casts of float64 tensors to float32 become no-ops."""
    to, float_, softmax = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax

    def lifted_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return to(self, *args, **kwargs)

    def lifted_type(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return self if self.dtype == torch.float64 and dtype is torch.float32 else type_(self, dtype, *args, **kwargs)

    def lifted_softmax(input: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        dtype = torch.float64 if input.dtype == torch.float64 and dtype is torch.float32 else dtype
        return softmax(input, *args, dtype=dtype, **kwargs)

    type_ = torch.Tensor.type
    with (
        mock.patch.object(torch.Tensor, "to", lifted_to),
        mock.patch.object(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else float_(self)),
        mock.patch.object(torch.Tensor, "type", lifted_type),
        mock.patch.object(torch.nn.functional, "softmax", lifted_softmax),
    ):
        yield


@contextmanager
def deterministic_index() -> Iterator[None]:
    """Stock indexers select by (score descending, position ascending), ties at exactly 0 included."""

    def stable_topk(self: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        keyed = torch.where(self == 0, torch.zeros_like(self), self)
        values, indices = torch.sort(keyed, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    def patched(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(torch.Tensor, "topk", stable_topk):
                return forward(self, *args, **kwargs)

        return run

    glm, deepseek = glm_moe_dsa.GlmMoeDsaIndexer, deepseek_v32.DeepseekV32Indexer
    with (
        mock.patch.object(glm, "forward", patched(glm.forward)),
        mock.patch.object(deepseek, "forward", patched(deepseek.forward)),
    ):
        yield


@contextmanager
def detached_prompt(model: nn.Module, boundary: int) -> Iterator[None]:
    """Detach at positions < boundary whatever one token hands to later ones; forward values are unchanged."""

    def cut(tensor: Tensor, dim: int) -> Tensor:
        dim = dim % tensor.dim()
        kept = tensor.shape[dim] - boundary
        return torch.cat([tensor.narrow(dim, 0, boundary).detach(), tensor.narrow(dim, boundary, kept)], dim=dim)

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query, cut(key, 2), cut(value, 2), *args, **kwargs)

    def convolution(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda hidden, *args, **kwargs: original(cut(hidden, -1), *args, **kwargs)

    def recurrence(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
            return original(query, cut(key, 1), cut(value, 1), g=cut(g, 1), beta=cut(beta, 1), **kwargs)

        return run

    def expansion(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, latent, rope: original(self, cut(latent, 2), cut(rope, 2))

    AttentionInterface.register("detached_prompt", attention)
    AttentionMaskInterface.register("detached_prompt", sdpa_mask)
    config: Any = model.config
    before = config._attn_implementation
    with ExitStack() as stack:
        for modeling in (qwen3_5, qwen3_5_moe, qwen3_next):
            for name, wrap in (("causal_conv1d_fn", convolution), ("torch_chunk_gated_delta_rule", recurrence)):
                stack.enter_context(mock.patch.object(modeling, name, wrap(getattr(modeling, name))))
        for attn in (glm_moe_dsa.GlmMoeDsaAttention, deepseek_v32.DeepseekV32Attention):
            stack.enter_context(mock.patch.object(attn, "expand_kv", expansion(attn.expand_kv)))
        if not hasattr(config, "kv_lora_rank"):  # latent attention is cut where latents are expanded
            config._attn_implementation = "detached_prompt"
        try:
            yield
        finally:
            config._attn_implementation = before


@contextmanager
def adapter_from(model: nn.Module, first: int) -> Iterator[None]:
    """The adapter acts at positions >= first only, in a forward over the whole sequence."""

    def mask(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        keep = (torch.arange(output.shape[-2]) >= first).to(output.dtype)
        return output * keep[:, None]

    layers = [module for name, module in model.named_modules() if name.endswith("lora_B.default")]
    handles = [layer.register_forward_hook(mask) for layer in layers]
    assert handles
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_adapted(prompt_tokens: int, scope: str) -> int:
    return prompt_tokens if scope == "response" else prompt_tokens - 1
