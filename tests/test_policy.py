"""The policy: run the engine's way and left as found, its weights versioned, its reference a model of its own.

Comparisons with the stock model are float64 (bound 1e-12, measured at most 1e-14) or bitwise.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn

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
    load_policy,
    sample_responses,
    score_responses,
    update_step,
)
from workbench.architectures import supported_model_types
from workbench.model_sources import TINY_FAMILIES, tiny_model

# One family of each adapter; what the other families share with it is tested elsewhere in all of them.
ADAPTERS = pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "glm_moe_dsa"])
PROMPT, RESPONSE = token_ids(22), token_ids(7, seed=1)
FLOAT64 = 1e-12


def scores(policy: Policy, prompt: Tensor = PROMPT, response: Tensor = RESPONSE) -> Tensor:
    return score_responses(policy, capture_prompt(policy, prompt, chunk_tokens=8), [response], block_tokens=3)[0]


def step(policy: Policy, **options: Any) -> Any:
    settings = {"advantages": [1.0], "chunk_tokens": 8, "block_tokens": 3, "measure_memory": False}
    return update_step(policy, PROMPT, [RESPONSE], **settings | options)


def sgd_step(policy: Policy, lr: float = 0.5) -> Any:
    return step(policy, optimizer=torch.optim.SGD([p for _, p in policy.trainable_parameters()], lr=lr))


def full_forward(model: nn.Module, response: Tensor = RESPONSE) -> Tensor:
    with torch.no_grad():
        return oracle.sequence_logprobs(model, PROMPT, response)


def largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


# ---------------------------------------------------------------- dropout and other settings of the caller


def with_dropout(family: str) -> Policy:
    """Every dropout there is: in the adapter and, where the family has it, in attention."""
    model = tiny_model(family, attention_dropout=0.1)
    return load_policy(model, lora={"r": 2, "lora_dropout": 0.1})


@ADAPTERS
def test_dropout_left_on_by_the_caller_is_off_in_every_pass(family):
    policy = with_dropout(family)
    train_adapter(policy.model)

    def everything() -> list[Tensor]:
        state = capture_prompt(policy, PROMPT, chunk_tokens=8)
        sampled = sample_responses(policy, state, 2, max_new_tokens=4, seed=0, eos_token_ids=None)
        found = [*score_responses(policy, state, [RESPONSE]), *(r.logprobs for r in sampled)]
        report = step(policy, objective=ObjectiveConfig(beta=0.1))
        found += [torch.tensor(report.loss), *report.logprobs]
        return found + list(oracle.take_gradients(policy.model).values())

    policy.model.eval()
    expected = everything()
    policy.model.train()
    assert any(isinstance(module, nn.Dropout) and module.p > 0 and module.training for module in policy.model.modules())
    found = everything()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.no_grad():  # dropout does act on this model when nobody turns it off
        noisy = [policy.model(input_ids=PROMPT[None], use_cache=False).logits for _ in range(2)]
    assert not torch.equal(*noisy)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "glm_moe_dsa"])
def test_the_model_is_left_as_found(family):
    """Training flags module by module, requires_grad, attention and expert kernels, adapter: also after an error."""
    policy = with_dropout(family)
    for number, module in enumerate(policy.model.modules()):
        module.training = number % 3 == 0
    before = Snapshot(policy.model)
    modeling = sys.modules[type(policy.adapter.base).__module__]  # kernels are replaced there for the duration
    kernels = vars(modeling).copy()

    def unchanged() -> None:
        assert before.differences() == []
        assert policy.model.active_adapters == ["default"]
        assert vars(modeling) == kernels

    state = capture_prompt(policy, PROMPT)
    score_responses(policy, state, [RESPONSE])
    score_responses(policy.reference, capture_prompt(policy.reference, PROMPT), [RESPONSE])
    sample_responses(policy, state, 2, max_new_tokens=2, seed=0)
    unchanged()
    step(policy, objective=ObjectiveConfig(beta=0.1))
    policy.model.zero_grad()
    unchanged()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = policy.adapter.base.layers[0].mlp.register_forward_hook(interrupt)
    for call in (
        lambda: capture_prompt(policy, PROMPT),
        lambda: score_responses(policy, state, [RESPONSE]),
        lambda: capture_prompt(policy.reference, PROMPT),
        lambda: sample_responses(policy, state, 2, max_new_tokens=2),
        lambda: step(policy),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
        unchanged()
    handle.remove()
    with policy.active(), policy.active():
        assert not any(module.training for module in policy.model.modules())
    unchanged()


# ---------------------------------------------------------------- weight versions


def edit_in_place(policy: Policy) -> None:
    with torch.no_grad():
        policy.trainable_parameters()[0][1].mul_(1.01)


def load_weights(policy: Policy) -> None:
    policy.model.load_state_dict(policy.model.state_dict())


def assign_weights(policy: Policy) -> None:
    policy.model.load_state_dict({k: v.clone() for k, v in policy.model.state_dict().items()}, assign=True)


def replace_data(policy: Policy) -> None:
    parameter = policy.trainable_parameters()[0][1]
    parameter.data = parameter.data * 1.01


def optimizer_step(kind: type[torch.optim.Optimizer]) -> Callable[[Policy], None]:
    def run(policy: Policy) -> None:
        step(policy, optimizer=kind([p for _, p in policy.trainable_parameters()], lr=1e-3))

    run.__name__ = kind.__name__
    return run


CHANGES = [
    edit_in_place,
    load_weights,
    assign_weights,
    replace_data,
    *map(optimizer_step, (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad)),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_every_change_of_weights_is_a_new_version(change, lora):
    policy = lora_policy("llama") if lora else tiny_policy("llama")
    assert policy.weight_version == policy.weight_version == 0
    change(policy)
    assert policy.weight_version == policy.weight_version == 1
    change(policy)
    assert policy.weight_version == 2
    if policy.reference is not None:
        assert policy.reference.weight_version == 2


def test_the_report_of_a_step_names_the_version_after_it():
    policy = tiny_policy("llama")
    assert step(policy).weight_version == 0
    assert sgd_step(policy).weight_version == 1 == policy.weight_version
    assert sgd_step(policy).weight_version == 2
    assert sgd_step(policy, lr=0.0).weight_version == 3


class DataWriter(torch.optim.SGD):
    """Older optimizers write through `.data`, which torch's version counters do not see."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad.data, alpha=group["lr"])


def test_a_step_counts_whatever_its_optimizer_writes_through():
    policy = tiny_policy("llama")
    state = capture_prompt(policy, PROMPT)
    writer = DataWriter([p for _, p in policy.trainable_parameters()], lr=0.1)
    assert step(policy, optimizer=writer).weight_version == policy.weight_version == 1
    with pytest.raises(StaleStateError):
        score_responses(policy, state, [RESPONSE])
    edit_in_place(policy)
    assert policy.weight_version == 2
    policy.note_weight_change()
    assert policy.weight_version == 3


def run_everything(policy: Policy) -> None:
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    score_responses(policy, state, [RESPONSE])
    sample_responses(policy, state, 2, max_new_tokens=2, seed=0)
    step(policy, state=state)
    step(policy, objective=ObjectiveConfig(beta=0.1 if policy.reference is not None else 0.0), checkpoint_layers=True)
    policy.model.zero_grad()


@ADAPTERS
def test_using_a_policy_does_not_change_its_version(family):
    for policy in (tiny_policy(family), lora_policy(family, trained=True)):
        version = policy.weight_version
        run_everything(policy)
        assert policy.weight_version == version


EXPERTS = {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("glm_moe_dsa", {"target_modules": "all-linear"}),
        ("qwen3_next", {"target_modules": "all-linear"}),
        ("qwen3_5_moe", EXPERTS),
    ],
    ids=["glm all-linear", "qwen3_next all-linear", "qwen3_5 experts"],
)
def test_lora_on_expert_parameters_keeps_its_version_through_forward_passes(family, targets):
    """PEFT writes the adapted experts into the model for the duration of each forward, and back."""
    model = get_peft_model(tiny_model(family), LoraConfig(r=2, task_type="CAUSAL_LM", **targets))
    policy = Policy(model)
    assert any(type(module).__name__ == "ParamWrapper" for module in model.modules())
    version = policy.weight_version
    run_everything(policy)
    assert policy.weight_version == version
    edit_in_place(policy)
    assert policy.weight_version == version + 1


def test_switching_the_adapter_changes_the_version():
    """A state captured with one adapter, or without, is not that of another."""
    policy = lora_policy("llama", trained=True)
    state = capture_prompt(policy, PROMPT)
    policy.model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
    versions = [policy.weight_version]
    policy.model.set_adapter("other")
    versions.append(policy.weight_version)
    policy.model.set_adapter("default")
    versions.append(policy.weight_version)
    with policy.model.disable_adapter():
        versions.append(policy.weight_version)
        with pytest.raises(StaleStateError, match=f"captured at weight version {state.weight_version}"):
            score_responses(policy, state, [RESPONSE])
    versions.append(policy.weight_version)
    assert versions == sorted(set(versions))


# ---------------------------------------------------------------- references (case 16)


@ADAPTERS
def test_a_fresh_adapter_is_its_base_bitwise_and_only_b_has_a_gradient(family):
    policy = with_dropout(family)
    policy.model.train()
    assert torch.equal(scores(policy), scores(policy.reference))
    report = step(policy, objective=ObjectiveConfig(beta=0.1))
    assert report.metrics["kl_mean"] == 0.0
    gradients = oracle.take_gradients(policy.model)
    of_a = [gradient for name, gradient in gradients.items() if "lora_A" in name]
    of_b = [gradient for name, gradient in gradients.items() if "lora_B" in name]
    assert len(of_a) + len(of_b) == len(gradients)
    assert not any(gradient.any() for gradient in of_a)
    assert sum(bool(gradient.any()) for gradient in of_b) >= len(of_b) - 2  # the last layer's prompt-only parts aside


@ADAPTERS
def test_after_a_step_the_reference_is_the_base_models_full_forward(family):
    """Its own prefix: base responses over an adapted prefix would lie between the two."""
    base = tiny_model(family).double()
    policy = load_policy(copy.deepcopy(base), lora=2, dtype=torch.float64)
    with float64_arithmetic():
        before = scores(policy.reference)
        sgd_step(policy)
        assert torch.equal(scores(policy.reference), before)
        assert largest_difference(scores(policy.reference), full_forward(base)) <= FLOAT64
        adapted = scores(policy)
        assert largest_difference(adapted, full_forward(policy.model.eval())) <= FLOAT64
        assert largest_difference(adapted, before) > 1e-3
        report = step(policy, objective=ObjectiveConfig(beta=0.1))
    log_ratio = full_forward_difference(base, policy, before, adapted)
    expected = float((log_ratio.exp() - log_ratio - 1.0).mean())  # k3
    assert expected > 1e-8
    assert abs(report.metrics["kl_mean"] - expected) <= 1e-9 * expected + FLOAT64


def full_forward_difference(base: nn.Module, policy: Policy, reference: Tensor, adapted: Tensor) -> Tensor:
    with float64_arithmetic():
        expected = full_forward(base) - full_forward(policy.model)
    assert largest_difference(reference - adapted, expected) <= FLOAT64
    return expected


@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
def test_another_adapter_can_be_the_reference(family):
    """An SFT adapter: with its own prefix, and without touching what the caller trains or has selected."""
    model = load_policy(tiny_model(family), lora=2, dtype=torch.float64).model
    model.add_adapter("sft", LoraConfig(r=3, target_modules=["o_proj"]))
    model.double()
    for name, seed in (("default", 1), ("sft", 2)):
        train_adapter(model, name, seed)
    model.set_adapter("default")
    policy, before = Policy(model, reference="sft"), Snapshot(model)
    with float64_arithmetic():
        reference, own = scores(policy.reference), scores(policy)
        step(policy, objective=ObjectiveConfig(beta=0.1))
        gradients = oracle.take_gradients(model)
        assert before.differences() == []  # requires_grad flags included, which PEFT's set_adapter flips
        assert model.active_adapters == ["default"]
        assert all(".default." in name for name in gradients)
        assert largest_difference(own, full_forward(model)) <= FLOAT64
        model.set_adapter("sft")
        assert largest_difference(reference, full_forward(model)) <= FLOAT64
        with model.disable_adapter():
            base = full_forward(model)
    assert min(largest_difference(a, b) for a, b in ((own, reference), (own, base), (reference, base))) > 1e-3


def test_training_flags_of_both_adapters_stay_where_the_caller_trains_both():
    policy = lora_policy("llama", trained=True)
    policy.model.add_adapter("sft", LoraConfig(r=3, target_modules=["o_proj"]))
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_("lora_" in name and "layers.0" in name)  # both adapters, one layer
    policy, before = Policy(policy.model, reference="sft"), Snapshot(policy.model)
    step(policy, objective=ObjectiveConfig(beta=0.1))
    policy.model.zero_grad()
    assert before.differences() == []


def test_a_frozen_copy_can_be_the_reference():
    model = tiny_model("qwen3_5")
    frozen = copy.deepcopy(model)
    for reference in (frozen, Policy(frozen)):
        policy = Policy(copy.deepcopy(model), reference=reference)
        assert torch.equal(scores(policy), scores(policy.reference))
        report = step(policy, objective=ObjectiveConfig(beta=0.1))
        assert report.metrics["kl_mean"] == 0.0
        sgd_step(policy)
        assert step(policy, objective=ObjectiveConfig(beta=0.1)).metrics["kl_mean"] > 0.0
        assert torch.equal(scores(policy.reference), scores(Policy(model)))
    assert all(parameter.grad is None for parameter in frozen.parameters())


def test_who_has_which_reference():
    assert tiny_policy("llama").reference is None
    policy = lora_policy("llama", trained=True)
    assert torch.equal(scores(policy.reference), scores(Policy(policy.model, reference="base").reference))
    assert policy.reference.reference is None
    with pytest.raises(InvalidInputError, match="reference='base': a name selects an adapter of a PEFT model"):
        Policy(tiny_model("llama"), reference="base")
    with pytest.raises(
        InvalidInputError, match=r"reference='sft' is not a loaded adapter; loaded: default \(or 'base'\)"
    ):
        Policy(policy.model, reference="sft")


# ---------------------------------------------------------------- vocabulary (case 21)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_columns_of_the_head_do_not_exist(family):
    """Normalised over the true vocabulary, forward and backward; ids beyond it are refused."""
    overrides = {"final_logit_softcapping": 5.0} if family == "gemma3" else {}
    model = tiny_model(family, **overrides).double()
    policy, prompt, response = Policy(model, vocab_size=90), PROMPT % 90, RESPONSE % 90
    with float64_arithmetic():
        logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0, 21:-1, :90]
        truth = torch.log_softmax(logits, dim=-1).gather(-1, response[:, None])[:, 0]
        assert largest_difference(scores(policy, prompt, response), truth.detach()) <= FLOAT64
        (-truth.sum() / 7).backward()
        expected = oracle.take_gradients(model)
        update_step(policy, prompt, [response], advantages=[1.0], chunk_tokens=8, measure_memory=False)
        assert oracle.relative_l2(oracle.take_gradients(model), expected) <= FLOAT64
    assert largest_difference(scores(Policy(model), prompt, response), truth.detach()) > 1e-2
    with pytest.raises(InvalidInputError, match="id 90 at position 0 is outside the vocabulary of 90 ids"):
        score_responses(policy, capture_prompt(policy, prompt), [[90]])


@pytest.mark.parametrize("size", [0, -1, 102])
def test_a_vocabulary_that_the_head_does_not_have(size):
    with pytest.raises(InvalidInputError, match=f"vocab_size={size} must be between 1 and the head's 101 columns"):
        Policy(tiny_model("llama"), vocab_size=size)


@pytest.mark.parametrize("positions", [0, -5])
def test_positions_that_cannot_be(positions):
    with pytest.raises(InvalidInputError, match=f"max_positions={positions} must be >= 1"):
        Policy(tiny_model("llama"), max_positions=positions)


# ---------------------------------------------------------------- what is not supported


def small(name: str, config: str, **fields: Any) -> nn.Module:
    return getattr(transformers, name)(getattr(transformers, config)(**fields))


TINY_BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
UNSUPPORTED = {
    "encoder": lambda: small("BertModel", "BertConfig", **TINY_BERT),
    "encoder with a head": lambda: small("BertForMaskedLM", "BertConfig", **TINY_BERT),
    "gpt2": lambda: small("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=1, n_head=2),
    "no head": lambda: tiny_model("llama").model,
    "no transformers model": lambda: nn.Linear(2, 2),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_models_are_refused_with_the_list_of_supported_ones(kind):
    with pytest.raises(UnsupportedModelError) as caught:
        Policy(UNSUPPORTED[kind]())
    assert all(model_type in str(caught.value) for model_type in supported_model_types())
    assert "is not a supported causal language model" in str(caught.value)


def test_every_tiny_family_is_supported_and_every_supported_type_is_tested():
    assert {tiny_model(family).config.model_type for family in TINY_FAMILIES} == set(supported_model_types())


def test_peft_methods_other_than_lora_are_refused():
    model = get_peft_model(
        tiny_model("llama"), IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    )
    with pytest.raises(UnsupportedModelError, match=r"PEFT methods \['IA3'\] are not supported; only LORA is"):
        Policy(model)


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("llama", {"new_trick": 3}, ["new_trick=3 (unknown field)"]),
        ("llama", {"new_trick": 3, "other_trick": "x"}, ["new_trick=3", "other_trick='x'"]),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, ["'dynamic'"]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, ["use_sliding_window=True (only False)"]),
        ("gemma3", {"attn_logit_softcapping": 30.0}, ["attn_logit_softcapping=30.0 (only None)"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
        ("qwen3_next", {"gate_limit": 1.0}, ["gate_limit=1.0 (unknown field)"]),
        ("glm_moe_dsa", {"scoring_func": "softmax"}, ["scoring_func='softmax' (only 'sigmoid')"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configuration_that_no_adapter_reproduces_is_listed(family, fields, named):
    model = tiny_model(family)
    for name, value in fields.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedModelError, match="configuration is not handled") as caught:
        Policy(model)
    assert all(part in str(caught.value) for part in named)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_whose_frequencies_are_fixed_works_in_chunks(rope):
    model = tiny_model("llama", rope_parameters=rope | {"rope_theta": 1e4}).double()
    with float64_arithmetic():
        found, plain = scores(Policy(model)), scores(tiny_policy("llama", torch.float64))
        assert largest_difference(found, full_forward(model)) <= FLOAT64
    assert largest_difference(found, plain) > 1e-3  # the scaling matters


# ---------------------------------------------------------------- small things


def test_what_a_policy_says_of_itself():
    policy = lora_policy("gemma3", dtype=torch.bfloat16)
    assert (policy.device.type, policy.dtype, policy.vocab_size, policy.max_positions) == (
        "cpu",
        torch.bfloat16,
        101,
        32768,
    )
    assert policy.eos_token_ids() == (2,)
    names = [name for name, _ in policy.trainable_parameters()]
    assert names
    assert all("lora_" in name for name in names)


def test_nan_weights_of_the_reference_are_its_own_fault():
    frozen = tiny_model("llama")
    policy = Policy(tiny_model("llama"), reference=frozen)
    with torch.no_grad():
        frozen.model.layers[0].mlp.up_proj.weight[0] = torch.nan
    before = Snapshot(policy.model)
    with pytest.raises(NonFiniteError, match="layer 0"):
        step(policy, objective=ObjectiveConfig(beta=0.1))
    assert before.differences() == []


@pytest.mark.parametrize("default", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("callers", [False, True])
def test_subnormals_are_flushed_within_and_the_callers_setting_comes_back(default, callers):
    def flushes() -> bool:
        return bool(torch.tensor(1e-39, dtype=torch.float32) * 0.5 == 0)

    policy = Policy(tiny_model("qwen3"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    torch.set_flush_denormal(callers)
    try:
        with policy.active():
            assert flushes()
        assert flushes() is callers
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_dtype(before)
