"""Checks of prompts and responses: one clear error before any work starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from workbench.comm import Comm, Mesh
from workbench.errors import InvalidInputError, UnsupportedModelError
from workbench.policy import Policy
from workbench.state.resident import ResidentState
from workbench.types import Response, is_number

Ids = Tensor | Sequence[int]
Function = TypeVar("Function", bound=Callable[..., Any])


def entry_point(function: Function) -> Function:
    """Keeps the caller's modes out of a public function of a policy.

    The engine says itself where it builds a graph: under the caller's `no_grad` parts of it would be missing, and
    tensors made under `inference_mode` could not be differentiated later. Autocast is refused: it would change dtypes
    between operations that must repeat each other.
    """

    @wraps(function)
    def run(policy: Policy, *args: Any, **options: Any) -> Any:
        if not isinstance(policy, Policy):
            raise InvalidInputError(f"policy is a {type(policy).__name__}; wrap the model: Policy(model)")
        if policy.device.type == "meta":  # the planner's study of shapes may hold such a policy, no work can
            raise UnsupportedModelError(f"{function.__name__}: the model is on the meta device; load it with weights")
        if any(torch.is_autocast_enabled(kind) for kind in {"cpu", policy.device.type}):
            raise InvalidInputError(
                f"{function.__name__} under torch.autocast: the model runs in its own dtype ({policy.dtype}); leave "
                "the autocast context, or load the model in the dtype that is wanted"
            )
        with torch.inference_mode(False), torch.enable_grad():
            return function(policy, *args, **options)

    return cast(Function, run)


def check_prompt(policy: Policy, prompt_ids: Ids) -> Tensor:
    """prompt_ids as a 1-D int64 CPU tensor of at least one id of the vocabulary."""
    prompt = _as_ids(prompt_ids, "prompt_ids")
    if prompt.numel() == 0:
        raise InvalidInputError(
            "prompt_ids is empty: a prompt needs at least one token, whose logits score the response"
        )
    _check_range(prompt, policy.vocab_size, "prompt_ids")
    check_positions(policy, prompt.numel(), "the prompt")
    return prompt


def check_responses(policy: Policy, prompt_tokens: int, responses: Sequence[Response | Ids]) -> list[Tensor]:
    """Each response as a 1-D int64 CPU tensor, uncopied if it is one: for use within a call. Empty ones are allowed."""
    if isinstance(responses, Tensor | Response) or not isinstance(responses, Sequence):
        raise InvalidInputError(
            f"responses must be a list of responses, one per member, not a {type(responses).__name__}"
        )
    if not responses:
        raise InvalidInputError("responses is empty: a group needs at least one member")
    checked = []
    for member, response in enumerate(responses):
        ids = _as_ids(response.ids if isinstance(response, Response) else response, f"response {member}", copy=False)
        _check_range(ids, policy.vocab_size, f"response {member}")
        check_positions(policy, prompt_tokens + ids.numel(), f"the prompt with response {member}")
        checked.append(ids)
    return checked


def check_end_ids(policy: Policy, end_ids: Ids) -> tuple[int, ...]:
    """Ids that end a response; each must be one that the policy can sample."""
    ids = _as_ids(end_ids, "eos_token_ids")
    _check_range(ids, policy.vocab_size, "eos_token_ids")
    return tuple(ids.tolist())


def check_resident_state(state: object) -> None:
    if not isinstance(state, ResidentState):
        raise InvalidInputError(f"state is a {type(state).__name__}; capture_prompt(policy, prompt_ids) makes one")


def check_ranks(policy: Policy, comm: object) -> Comm | None:
    """The ranks that share a prompt's tokens, None for one process; refuses a mesh that the model does not fit."""
    if comm is not None and not isinstance(comm, Mesh):
        raise InvalidInputError(f"comm is a {type(comm).__name__}; workbench.parallel.open_mesh(...) makes a Mesh")
    experts = getattr(policy.adapter.causal_lm, "expert_comm", None)
    if experts is not None and (comm is None or comm.experts is not experts):
        raise InvalidInputError(
            "this model's experts are spread over ranks (shard_experts): give comm=, the mesh of that call"
        )
    if comm is not None and any(hasattr(p, "device_mesh") for p in policy.model.parameters()):
        raise UnsupportedModelError("weights sharded over ranks (FSDP, DTensor) are not supported; load them whole")
    ranks = None if comm is None or comm.context.size == 1 else comm.context
    if ranks is not None and policy.adapter_scope != "all":
        raise UnsupportedModelError(
            f"adapter_scope={policy.adapter_scope!r} over ranks that share a prompt: the adapter's mask "
            "does not know which tokens a rank owns; use adapter_scope='all', or ranks for data only"
        )
    return ranks


def check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise InvalidInputError(f"seed={seed!r} must be an integer of 64 bits")


def check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError(f"{name}={value!r} must be an integer >= 1")


def check_temperature(temperature: float) -> None:
    if not (is_number(temperature) and 0.0 < temperature < math.inf):
        raise InvalidInputError(f"temperature={temperature!r} must be a finite number > 0")


def _as_ids(ids: Ids, what: str, *, copy: bool = True) -> Tensor:
    try:
        tensor = ids.to("cpu") if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidInputError(f"{what} is not a sequence of token ids: {error}") from None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InvalidInputError(f"{what} is a {tensor.layout} {tensor.dtype} tensor; give a plain one")
    if tensor.numel() == 0:
        tensor = tensor.to(torch.int64)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise InvalidInputError(f"{what} has dtype {tensor.dtype}; token ids are integers")
    if tensor.dim() != 1:
        raise InvalidInputError(f"{what} has shape {tuple(tensor.shape)}; give a 1-D tensor or list of token ids")
    return tensor.detach().to("cpu", torch.int64, copy=copy or tensor.is_inference())  # those do not go with autograd


def _check_range(ids: Tensor, vocab_size: int, what: str) -> None:
    bad = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if bad.numel():
        position = int(bad[0])
        raise InvalidInputError(
            f"{what}: id {int(ids[position])} at position {position} is outside the vocabulary of {vocab_size} ids"
        )


def check_positions(policy: Policy, tokens: int, what: str) -> None:
    if tokens > policy.max_positions:
        raise InvalidInputError(
            f"{what} has {tokens} positions, more than the model's max_position_embeddings of {policy.max_positions}; "
            "shorten it, or lift the limit with Policy(..., max_positions=N) if the model is good beyond it"
        )
