"""Input that no careful caller gives: each kind is either refused in one sentence, or gives the right number."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraConfig
from torch import nn

from tests import oracle
from tests.helpers import Snapshot, float64_arithmetic, lora_policy, tiny_policy, token_ids, train_adapter
from workbench import (
    InvalidInputError,
    NonFiniteError,
    ObjectiveConfig,
    Policy,
    StaleStateError,
    UnsupportedModelError,
    capture_prompt,
    group_advantages,
    load_policy,
    plan,
    sample_responses,
    score_responses,
    update_step,
)
from workbench.model_sources import tiny_model

PROMPT = token_ids(22)
RESPONSES = [token_ids(7, seed=1), token_ids(4, seed=2), token_ids(1, seed=3)]
ADVANTAGES = [1.0, -0.5, 0.7]


def step(policy: Policy, **options: Any) -> Any:
    settings = {"advantages": ADVANTAGES, "chunk_tokens": 8, "block_tokens": 3, "measure_memory": False}
    return update_step(policy, PROMPT, RESPONSES, **settings | options)


def error_of_gradient(model: Any, **options: Any) -> float:
    with float64_arithmetic():
        step(Policy(model), **options)
        found = oracle.take_gradients(model)
        truth = oracle.grpo_gradient(model, PROMPT, RESPONSES, ADVANTAGES)
    return oracle.relative_l2(found, truth)


# ---------------------------------------------------------------- the caller's modes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "glm_moe_dsa"])
def test_modes_of_the_caller_do_not_reach_the_engine(family, mode):
    model = tiny_model(family).double()
    policy = Policy(model)
    with float64_arithmetic():
        with mode():
            state = capture_prompt(policy, PROMPT, chunk_tokens=8)
            scores = score_responses(policy, state, RESPONSES)
            sample_responses(policy, state, 2, max_new_tokens=2, seed=0)
            step(policy, old_logprobs=scores)
        inside = oracle.take_gradients(model)
        step(policy, state=state)
        with_its_state = oracle.take_gradients(model)
        truth = oracle.grpo_gradient(model, PROMPT, RESPONSES, ADVANTAGES)
    assert oracle.relative_l2(inside, truth) <= 1e-11
    assert oracle.relative_l2(with_its_state, truth) <= 1e-11


def test_autocast_is_refused():
    policy = tiny_policy("llama")
    state, before = capture_prompt(policy, PROMPT), Snapshot(policy.model)
    calls = [
        lambda: capture_prompt(policy, PROMPT),
        lambda: score_responses(policy, state, RESPONSES),
        lambda: sample_responses(policy, state, 1, max_new_tokens=1),
        lambda: step(policy),
    ]
    for call in calls:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidInputError, match="under torch"):
            call()
    assert before.differences() == []


# ---------------------------------------------------------------- hooks and other wrappers


def doubled(module: Any, *args: Any) -> Any:
    return args[-1] * 2


def halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def patch_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda hidden: forward(hidden) * 2


WRAPPINGS = {
    "forward hook": lambda module: module.register_forward_hook(doubled),
    "forward pre-hook": lambda module: module.register_forward_pre_hook(
        lambda _, args: (args[0] * 2 if args[0].is_floating_point() else args[0],)
    ),
    "hook of the weight": lambda module: module.weight.register_hook(halve),
    "parametrization": lambda module: nn.utils.parametrize.register_parametrization(module, "weight", Twice()),
    "replaced forward": patch_forward,
    "backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
    "nothing": lambda module: None,
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
@pytest.mark.parametrize("place", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj"])
def test_hooks_take_part_in_the_gradient(place, wrap):
    """The head's and the embedding's gradients are added without autograd where that is the same, and only there."""
    model = tiny_model("llama").double()
    wrap(model.get_submodule(place))
    assert error_of_gradient(model) <= 1e-11


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_of_the_head():
    model = tiny_model("llama").double()
    nn.utils.weight_norm(model.lm_head)
    assert error_of_gradient(model) <= 1e-11


def test_optimizers_in_backward_are_refused():
    policy = tiny_policy("llama")
    handle = policy.model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(InvalidInputError, match="post-accumulate-grad hook"):
        step(policy)
    handle.remove()
    step(policy)


# ---------------------------------------------------------------- adapters


def test_a_merged_adapter_is_refused_and_left_merged():
    policy = lora_policy("llama", trained=True)
    model: Any = policy.model
    model.merge_adapter()
    before = Snapshot(model)
    for run in (lambda: step(policy), lambda: step(policy, objective=ObjectiveConfig(beta=0.1)), lambda: Policy(model)):
        with pytest.raises(UnsupportedModelError, match="an adapter is merged"):
            run()
    assert before.differences() == []
    model.unmerge_adapter()
    assert step(policy).metrics["grad_norm"] > 0.0


def test_activated_lora_is_refused():
    with pytest.raises(UnsupportedModelError, match="alora_invocation_tokens"):
        load_policy(tiny_model("llama"), lora={"r": 2, "alora_invocation_tokens": [5, 6]})


@pytest.mark.filterwarnings("ignore:.*lora_bias:UserWarning")
def test_a_bias_on_the_latent_up_projection_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"kv_b_proj.*bias is not supported"):
        load_policy(tiny_model("glm_moe_dsa"), lora={"r": 2, "lora_bias": True})


def test_a_base_that_initialisation_has_changed_is_no_reference():
    policy = load_policy(tiny_model("llama"), lora={"r": 2, "init_lora_weights": "pissa"})
    assert policy.reference is None
    with pytest.raises(InvalidInputError, match="needs a reference"):
        step(policy, objective=ObjectiveConfig(beta=0.1))
    with pytest.raises(InvalidInputError, match="init_lora_weights='pissa' moved"):
        Policy(policy.model, reference="base")


@pytest.mark.parametrize("change", ["disable", "scale"])
def test_switching_or_scaling_an_adapter_makes_states_stale(change):
    """Also where the adapter was injected into a plain transformers model."""
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["v_proj"]), tiny_model("llama"))
    train_adapter(model)
    policy = Policy(model)
    state = capture_prompt(policy, PROMPT)
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "merged_adapters")]
    for layer in layers:
        layer.enable_adapters(False) if change == "disable" else layer.set_scale("default", 7.0)
    with pytest.raises(StaleStateError):
        score_responses(policy, state, RESPONSES)


def test_changed_buffers_make_states_stale():
    policy = tiny_policy("glm_moe_dsa")
    state = capture_prompt(policy, PROMPT)
    dict(policy.model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"].add_(1.0)
    with pytest.raises(StaleStateError):
        score_responses(policy, state, RESPONSES)


# ---------------------------------------------------------------- references and models


def test_references_that_are_no_reference():
    model = tiny_model("llama")
    with pytest.raises(InvalidInputError, match="shares trainable parameters"):
        Policy(model, reference=model)
    with pytest.raises(InvalidInputError, match="vocabulary of 90 ids, the policy one of 101"):
        Policy(model, reference=Policy(tiny_model("llama", seed=1), vocab_size=90))
    with pytest.raises(InvalidInputError, match="reference is a int"):
        Policy(model, reference=3)  # type: ignore[arg-type]


def test_models_without_usable_weights():
    with torch.inference_mode():
        made_there = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="an inference tensor"):
        Policy(made_there)
    with pytest.raises(UnsupportedModelError, match="capture_prompt: the model is on the meta device"):
        capture_prompt(Policy(tiny_model("llama").to("meta")), [3, 4, 5])
    with pytest.raises(UnsupportedModelError, match="not a NoneType"):
        Policy(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora": 4, "reference": "nope"}, "is not a loaded adapter"),
        ({"dtype": torch.float64, "reference": "nope"}, "a name selects an adapter"),
        ({"dtype": torch.float64, "vocab_size": 0}, "vocab_size=0"),
        ({"vocab_size": 2.5}, "vocab_size=2.5"),
        ({"max_positions": True}, "max_positions=True"),
        ({"dtype": "float32"}, "is no floating-point torch.dtype"),
        ({"dtype": torch.int8}, "is no floating-point torch.dtype"),
        ({"device": "nope"}, "cannot be used here"),
        ({"device": 3.5}, "cannot be used here"),
        ({"lora": 2, "seed": "x"}, "seed='x'"),
    ],
)
def test_options_of_loading_are_refused_before_the_model_changes(options, named):
    model = tiny_model("llama")
    before = Snapshot(model)
    with pytest.raises(InvalidInputError, match=named):
        load_policy(model, **options)
    assert before.differences() == []


@pytest.mark.parametrize("source", [None, 5, ""])
def test_sources_that_are_none(source):
    with pytest.raises(InvalidInputError, match="neither a model nor a folder or hub id"):
        load_policy(source)


# ---------------------------------------------------------------- optimizers


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no step today")


@pytest.mark.parametrize("earlier", [False, True])
def test_an_optimizer_that_fails_leaves_the_gradients(earlier):
    policy = tiny_policy("llama")
    step(policy) if earlier else None
    before = Snapshot(policy.model)
    with pytest.raises(RuntimeError, match="no step today"):
        step(policy, optimizer=Failing(policy.model.parameters(), lr=0.1))
    assert before.differences() == []


def test_what_is_no_optimizer():
    policy = tiny_policy("llama")
    for optimizer in ("adam", torch.optim.SGD, torch.optim.LBFGS(policy.model.parameters())):
        with pytest.raises(InvalidInputError, match="step needs no closure"):
            step(policy, optimizer=optimizer)


# ---------------------------------------------------------------- wrong types and extreme numbers


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {name: bad}
            for name in ("temperature", "beta", "clip_low", "advantage_eps")
            for bad in ("a", None, math.inf)
        ),
        {"temperature": torch.ones(2)},
        {"clip_high": None},
        {"clip_high": math.nan},
        {"max_grad_norm": "a"},
        {"drop_zero_variance_groups": "no"},
        *({"loss": "dr_grpo", "max_response_tokens": bad} for bad in (2.5, True, "a", math.inf)),
    ],
)
def test_objectives_that_make_no_sense(fields):
    with pytest.raises(InvalidInputError, match="ObjectiveConfig: "):
        ObjectiveConfig(**fields)


def test_group_ids_of_any_kind():
    rewards, expected = [1.0, 0.0, 3.0, 1.0], group_advantages([1.0, 0.0, 3.0, 1.0], group_ids=[0, 0, 1, 1])
    for ids in (torch.tensor([4, 4, 5, 5]), [torch.tensor(i) for i in (4, 4, 5, 5)], "aabb"):
        assert torch.equal(group_advantages(rewards, group_ids=ids), expected)
    for bad in (5, [[1], [1], [2], [2]], torch.zeros(4, 1)):
        with pytest.raises(InvalidInputError, match="group_ids must be hashable ids"):
            group_advantages(rewards, group_ids=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="eps='a'"):
        group_advantages(rewards, eps="a")  # type: ignore[arg-type]


def test_what_is_no_policy_and_no_state():
    policy = tiny_policy("llama")
    state, model = capture_prompt(policy, PROMPT), policy.model
    calls = [
        lambda: capture_prompt(model, PROMPT),  # type: ignore[arg-type]
        lambda: score_responses(model, state, RESPONSES),  # type: ignore[arg-type]
        lambda: sample_responses(model, state, 2, max_new_tokens=1),  # type: ignore[arg-type]
        lambda: step(model),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match=r"policy is a LlamaForCausalLM; wrap the model"):
            call()
    for call in (
        lambda: score_responses(policy, None, RESPONSES),  # type: ignore[arg-type]
        lambda: sample_responses(policy, None, 2, max_new_tokens=1),  # type: ignore[arg-type]
        lambda: step(policy, state="x"),
    ):
        with pytest.raises(InvalidInputError, match=r"state is a .*; capture_prompt"):
            call()


@pytest.mark.parametrize(
    "ids", [[2**70], torch.zeros(3, dtype=torch.int64, device="meta")], ids=["beyond int64", "meta"]
)
def test_ids_that_cannot_be_read(ids):
    with pytest.raises(InvalidInputError, match="prompt_ids is not a sequence of token ids"):
        capture_prompt(tiny_policy("llama"), ids)


@pytest.mark.parametrize(
    "bad", [torch.zeros(7, dtype=torch.complex64), torch.zeros(7, device="meta"), torch.ones(7) > 0]
)
def test_old_log_probs_that_are_no_numbers(bad):
    with pytest.raises(InvalidInputError, match="old_logprobs of response 0 have dtype"):
        step(tiny_policy("llama"), old_logprobs=[bad, torch.zeros(4), torch.zeros(1)])


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"temperature": "x"}, InvalidInputError, "temperature='x'"),
        ({"temperature": 1e-320}, NonFiniteError, "sampling at temperature"),
        ({"top_p": None}, InvalidInputError, "top_p=None"),
        ({"seed": "x"}, InvalidInputError, "seed='x'"),
        ({"seed": 2**64}, InvalidInputError, "must be an integer of 64 bits"),
        ({"top_p": 1e-300}, None, ""),
        ({"temperature": 1e-30}, None, ""),
    ],
)
def test_sampling_options_at_the_edge(options, error, named):
    policy = tiny_policy("llama")
    state = capture_prompt(policy, PROMPT)
    with nullcontext() if error is None else pytest.raises(error, match=named):
        responses = sample_responses(policy, state, 3, **{"max_new_tokens": 3, "seed": 0} | options)
        assert len({tuple(r.ids.tolist()) for r in responses}) == 1, "so sharp a distribution has one response"


@pytest.mark.parametrize(
    "rewards",
    [{0: 1.0, 1: 0.0, 2: 0.0}, {1.0, 2.0, 3.0}, "100", b"100", iter([1.0, 0.0, 0.0])],
    ids=["dict", "set", "str", "bytes", "iterator"],
)
def test_rewards_without_an_order_or_that_are_text(rewards):
    with pytest.raises(InvalidInputError, match="rewards must be a list or tensor"):
        group_advantages(rewards)


@pytest.mark.parametrize("rewards", [torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.complex64)])
def test_rewards_that_are_no_real_numbers(rewards):
    with pytest.raises(InvalidInputError, match="rewards must be real numbers"):
        group_advantages(rewards)


def test_ids_that_are_no_plain_tensor():
    with pytest.raises(
        InvalidInputError, match=r"prompt_ids is a torch.sparse_coo torch.int64 tensor; give a plain one"
    ):
        capture_prompt(tiny_policy("llama"), torch.tensor([1, 2]).to_sparse())


def test_a_reference_that_training_would_move_is_refused():
    """Trained biases belong to the base model: with the adapter off they stay trained."""
    model = tiny_model("llama", attention_bias=True)
    policy = load_policy(model, lora={"r": 2, "bias": "all"})
    step(policy)  # without a KL term nothing is wrong
    with pytest.raises(InvalidInputError, match="bias outside the adapter is trained too"):
        step(policy, objective=ObjectiveConfig(beta=0.1))
    copy = Policy(policy.model, reference=tiny_model("llama", attention_bias=True))
    step(copy, objective=ObjectiveConfig(beta=0.1))


@pytest.mark.parametrize("gpu", [None, 5])
def test_a_gpu_that_is_no_name(gpu):
    with pytest.raises(InvalidInputError, match="neither a name of the catalogue nor a Gpu"):
        plan("Qwen3-8B", gpu, positions=4096, group_size=2, response_tokens=64)


def test_positions_beyond_any_machine_are_refused():
    with pytest.raises(InvalidInputError, match=r"positions=.* must be"):
        plan("Qwen3-8B", "H200-SXM", positions=2**200, group_size=2, response_tokens=64)
