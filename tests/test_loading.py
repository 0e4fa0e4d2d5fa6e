"""Loading a policy: which modules an adapter reaches, that a seed decides it, and clear refusals."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from tokenizers import Tokenizer, models
from torch import nn

from tests import oracle
from tests.helpers import Snapshot, lora_policy, token_ids, train_adapter
from workbench import (
    InvalidInputError,
    Policy,
    UnsupportedModelError,
    capture_prompt,
    load_policy,
    score_responses,
    update_step,
)
from workbench.model_sources import TINY_FAMILIES, ByteTokenizer, tiny_model

PROMPT, RESPONSE = token_ids(20), token_ids(5, seed=1)


def adapted(policy: Policy) -> set[str]:
    """Names of the base model's modules that have an adapter."""
    names = (name for name, _ in policy.model.named_parameters() if ".lora_A." in name)
    return {name.removeprefix("base_model.model.").split(".lora_A.")[0] for name in names}


# ---------------------------------------------------------------- where the adapter goes


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_linear_of_the_decoder_has_an_adapter_but_head_indexer_router_and_experts(family):
    model = tiny_model(family)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    excluded = {name for name in linears if name == "lm_head" or ".indexer." in name}
    policy = load_policy(model, lora=2)
    found = adapted(policy)
    assert found == linears - excluded
    assert not any(part in name.split(".") for name in found for part in ("indexer", "lm_head", "gate", "experts"))
    assert len(found) >= 7 * (policy.adapter.num_layers - 1)
    assert (family in ("glm_moe_dsa", "deepseek_v32")) == (len(excluded) > 1)
    for name, parameter in policy.model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32", "qwen3_next", "qwen3_5_moe"])
def test_every_adapter_of_a_sparse_or_mixed_model_has_a_gradient(family):
    """An adapter that nothing flows through would be memory for nothing: full scope, after B has left zero."""
    policy = lora_policy(family, trained=True)
    update_step(policy, PROMPT, [RESPONSE], advantages=[1.0], measure_memory=False)
    without = [name for name, p in policy.trainable_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("family", ["glm_moe_dsa", "qwen3_next"])
def test_names_mean_modules_of_the_loaded_model(family):
    """PEFT would read up_proj of a mixture model as its experts, and skip the feed-forwards that have that name."""
    model = tiny_model(family)
    linears = {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name.endswith("up_proj")}
    policy = load_policy(model, lora={"r": 2, "target_modules": ["up_proj"]})
    assert adapted(policy) == linears
    assert not any(type(module).__name__ == "ParamWrapper" for module in policy.model.modules())


def test_experts_can_be_adapted_by_name():
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    policy = load_policy(tiny_model("glm_moe_dsa"), lora={"r": 2, "target_modules": [], "target_parameters": targets})
    assert any(type(module).__name__ == "ParamWrapper" for module in policy.model.modules())
    update_step(policy, PROMPT, [RESPONSE], advantages=[1.0], measure_memory=False)
    assert any(p.grad is not None and p.grad.any() for _, p in policy.trainable_parameters())


def test_rank_and_scale():
    for lora, rank, alpha in (
        (4, 4, 8),
        ({"r": 4}, 4, 8),
        ({"lora_alpha": 5}, 8, 5),
        ({"r": 3, "lora_alpha": 9}, 3, 9),
    ):
        config = load_policy(tiny_model("llama"), lora=lora).model.peft_config["default"]
        assert (config.r, config.lora_alpha) == (rank, alpha)
    policy = load_policy(tiny_model("llama"), lora=LoraConfig(r=5, target_modules=["o_proj"]))
    assert adapted(policy) == {f"model.layers.{i}.self_attn.o_proj" for i in range(2)}
    assert {p.shape[0] for name, p in policy.trainable_parameters() if "lora_A" in name} == {5}


def test_an_adapter_starts_as_nothing():
    model = tiny_model("qwen3_5")
    before = score_responses(plain := Policy(tiny_model("qwen3_5")), capture_prompt(plain, PROMPT), [RESPONSE])
    policy = load_policy(model, lora=4)
    assert torch.equal(score_responses(policy, capture_prompt(policy, PROMPT), [RESPONSE])[0], before[0])
    for name, parameter in policy.trainable_parameters():
        assert bool(parameter.any()) == ("lora_A" in name)


# ---------------------------------------------------------------- seeds


def initial(seed: int) -> dict[str, torch.Tensor]:
    policy = load_policy(tiny_model("llama"), lora=2, seed=seed)
    return {name: p.detach().clone() for name, p in policy.trainable_parameters()}


def test_a_seed_decides_the_adapter_and_leaves_the_callers_random_state_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = initial(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again, other = initial(3), initial(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


# ---------------------------------------------------------------- sources


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(101)}, unk_token="<0>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<2>").save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    save_tokenizer(path)
    return path


def test_a_folder_is_the_model_that_was_saved_there(folder):
    loaded, expected = load_policy(folder), Policy(tiny_model("llama"))
    assert loaded.tokenizer.eos_token_id == 2
    assert not loaded.model.training
    scores = [score_responses(p, capture_prompt(p, PROMPT), [RESPONSE])[0] for p in (loaded, expected)]
    assert torch.equal(*scores)
    assert load_policy(str(folder), lora=2).reference is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype(folder, dtype):
    for policy in (load_policy(folder, dtype=dtype), load_policy(tiny_model("llama"), dtype=dtype, device="cpu")):
        assert policy.dtype == dtype
        assert {p.dtype for p in policy.model.parameters()} == {dtype}
        assert policy.device == torch.device("cpu")


def test_options_reach_the_policy():
    reference = tiny_model("llama", seed=1)
    policy = load_policy(tiny_model("llama"), reference=reference, vocab_size=90, max_positions=50)
    assert (policy.vocab_size, policy.max_positions) == (90, 50)
    assert policy.reference.model is reference
    assert policy.reference.vocab_size == 90
    tokenizer = ByteTokenizer()
    assert Policy(tiny_model("llama"), tokenizer).tokenizer is tokenizer


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (0, "`r` should be a positive integer"),
        (-1, "`r` should be a positive integer"),
        (True, "give a rank, a mapping"),
        (2.0, "give a rank, a mapping"),
        ("8", "give a rank, a mapping"),
        ([1, 2], "give a rank, a mapping"),
        ({"rank": 4}, "unexpected keyword argument 'rank'"),
        ({"r": 2, "target_modules": ["nope"]}, "'nope'.* not found in the base model"),
        (LoraConfig(r=0, target_modules=["o_proj"]), "`r` should be a positive integer"),
    ],
    ids=lambda value: str(value)[:25],
)
def test_an_adapter_that_cannot_be_is_refused_and_the_model_unchanged(lora, message):
    model = tiny_model("llama")
    before = Snapshot(model)
    with pytest.raises(InvalidInputError, match=message) as caught:
        load_policy(model, lora=lora)
    assert str(caught.value).startswith("lora=")
    assert before.differences() == []
    assert not hasattr(model, "peft_config")


def test_a_model_that_has_an_adapter_gets_no_second_one():
    model = lora_policy("llama").model
    before = Snapshot(model)
    with pytest.raises(InvalidInputError, match="the model has an adapter already; leave lora=None"):
        load_policy(model, lora=2)
    assert before.differences() == []
    assert load_policy(model).model is model


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lora": 2, "vocab_size": 200}, InvalidInputError, "vocab_size=200 must be between 1 and"),
        ({"lora": 2, "max_positions": 0}, InvalidInputError, "max_positions=0 must be >= 1"),
        (
            {"adapter_scope": "response"},
            InvalidInputError,
            "adapter_scope='response' is about a LoRA adapter: give lora=",
        ),
        ({"adapter_scope": "prefix"}, InvalidInputError, "adapter_scope='prefix' is not one of all, response, replay"),
        ({"quantization": "int8"}, InvalidInputError, "quantization='int8' is not one of None, 'nf4'"),
        ({"quantization": "nf4"}, InvalidInputError, "quantization applies while weights are read"),
        ({"reference": "sft"}, InvalidInputError, "reference='sft'"),
    ],
    ids=str,
)
def test_refused_options_leave_the_model_unchanged(options: dict[str, Any], error, message):
    model = tiny_model("llama")
    before = Snapshot(model)
    with pytest.raises(error, match=message):
        load_policy(model, **options)
    assert before.differences() == []


def test_an_unsupported_model_is_refused_before_it_gets_an_adapter():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2))
    before = Snapshot(model)
    for lora in (None, 2, {"r": 2, "target_modules": ["c_attn"]}):
        with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
            load_policy(model, lora=lora)
        assert before.differences() == []


# ---------------------------------------------------------------- quantization

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


@pytest.mark.skipif(HAS_BITSANDBYTES, reason="bitsandbytes is installed")
def test_nf4_without_bitsandbytes_names_the_extra(folder):
    with pytest.raises(InvalidInputError, match="needs bitsandbytes: install the `quantization` extra"):
        load_policy(folder, quantization="nf4")


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes, the `quantization` extra")
def test_nf4_weights_with_an_adapter_take_a_step(tmp_path):
    """4-bit weights are frozen; the adapter has a gradient, and log-probs are near the unquantized ones."""
    plain = Policy(tiny_model("llama", hidden_size=64, intermediate_size=128))  # blocks of 64 weights, on a CPU by row
    plain.model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    policy = load_policy(tmp_path, quantization="nf4", lora=2)
    assert any(type(module).__name__ == "Linear4bit" for module in policy.model.modules())
    version = policy.weight_version
    train_adapter(policy.model)
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    scores = score_responses(policy, state, [RESPONSE])
    report = update_step(policy, PROMPT, [RESPONSE], advantages=[1.0], chunk_tokens=8, old_logprobs=scores)
    assert report.metrics["ratio_max"] == report.metrics["ratio_min"] == 1.0
    assert policy.weight_version == version + 1  # the adapter's training above, and nothing else
    assert all(bool(p.grad.any()) for _, p in policy.trainable_parameters())
    (exact,) = score_responses(plain, capture_prompt(plain, PROMPT), [RESPONSE])
    assert 1e-3 < float((report.logprobs[0] - exact).abs().mean()) < 1.0  # measured 0.42

    found = oracle.take_gradients(policy.model)
    policy.model.train()  # else bitsandbytes repacks 4-bit weights on some CPUs, which leaves them without a backward
    truth = oracle.grpo_gradient(policy.model, PROMPT, [RESPONSE], [1.0])
    assert oracle.relative_l2(found, truth) <= 1e-5  # measured 9.5e-7, float32


EXPERTS = {"r": 2, "target_modules": ["q_proj", "o_proj"], "target_parameters": ["mlp.experts.down_proj"]}


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes, the `quantization` extra")
@pytest.mark.parametrize(
    ("family", "lora", "scope"),
    [
        ("gemma3", 2, "all"),
        ("qwen3_5", 2, "all"),
        ("qwen3_5", 2, "replay"),
        ("qwen3_5_moe", EXPERTS, "all"),
        ("glm_moe_dsa", 2, "all"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nf4_gradients_are_those_of_the_same_quantised_model(family, lora, scope, tmp_path):
    """Full scope against full-sequence autograd, float32 compute; what NF4 leaves out is named in the report."""
    tiny_model(family, hidden_size=64, intermediate_size=128, initializer_range=0.02).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    policy = load_policy(tmp_path, quantization="nf4", lora=lora, adapter_scope=scope)
    train_adapter(policy.model)
    report = update_step(policy, PROMPT, [RESPONSE], advantages=[1.0], chunk_tokens=8, block_tokens=4)
    found = oracle.take_gradients(policy.model)
    policy.model.train()  # else bitsandbytes repacks 4-bit weights on some CPUs, which leaves them without a backward
    first = 0 if scope == "all" else len(PROMPT) - 1
    masked = oracle.adapter_from(policy.model, first) if first else nullcontext()
    with masked, oracle.deterministic_index():
        truth = oracle.grpo_gradient(policy.model, PROMPT, [RESPONSE], [1.0])
    assert oracle.relative_l2(found, truth) <= 1e-5  # measured <= 1.1e-6
    experts = {name for name, p in policy.model.named_parameters() if p.dim() == 3 and ".experts." in name}
    assert experts <= policy.unquantized_weights().keys()
    assert bool(experts) == family.startswith(("qwen3_5_moe", "glm"))
    (note,) = [note for note in report.metrics["notes"] if note.startswith("NF4 left")]
    assert all(name in note for name in experts)
    assert "lora" not in note
    assert Policy(tiny_model("llama")).unquantized_weights() == {}


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes, the `quantization` extra")
def test_weights_that_bitsandbytes_has_repacked_are_refused(tmp_path):
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    policy = load_policy(tmp_path, quantization="nf4", lora=2)
    layer = next(module for module in policy.model.modules() if hasattr(module, "support_avx512bf16_for_cpu"))
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedModelError, match="has repacked 4-bit weights"):
        capture_prompt(policy, PROMPT)


def test_a_source_that_cannot_be_read_says_what_it_could_have_been(tmp_path):
    with pytest.raises(InvalidInputError, match=r"no readable model folder.*not 'gemma3-270m'"):
        load_policy(tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_folder_without_a_tokenizer_has_none(family: str, tmp_path: Path) -> None:
    """transformers would make up an empty one, which reads every text as nothing, or fail."""
    tiny_model(family).save_pretrained(tmp_path)
    assert load_policy(tmp_path).tokenizer is None
