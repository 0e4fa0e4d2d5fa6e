"""The catalogues: counts against transformers, sizes against published ones, names, a user's own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from workbench import InvalidInputError
from workbench.planner import Request, catalogue, find_gpu, find_model, plan
from workbench.planner import sizes as s
from workbench.planner.sources import CATALOGUE_VARIABLE, DATA, model_config

MODELS = sorted(catalogue("models"))
RANK_16 = Request(positions=10_000, group_size=2, response_tokens=10)


def test_both_catalogues_are_complete() -> None:
    assert len(MODELS) >= 14
    assert len(catalogue("gpus")) >= 10
    for kind in ("models", "gpus"):
        for name, entry in catalogue(kind).items():
            assert entry["source"], name
            assert entry["confidence"], name


def test_data_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert DATA.is_absolute()
    assert find_model("Qwen3-8B").num_params == 8_190_735_360


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_parameters_against_transformers(name: str) -> None:
    """Every parameter, and those of the decoder's linears, as transformers builds them on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(name), dtype=torch.bfloat16)
    shape = find_model(name)
    counted = sum(p.numel() for p in model.parameters())
    assert shape.num_params == counted == catalogue("models")[name]["parameters"]
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("lm_head")]
    assert sum(layer.linear_weights for layer in shape.layers) == sum(m.weight.numel() for m in linears)
    adapted = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "indexer" not in n]
    adapted = [m for m in adapted if m is not model.lm_head]
    assert shape.lora_params(16) == sum(16 * (m.in_features + m.out_features) for m in adapted)


# NF4 linears (and experts) with the rest in bf16, GB; rows per token; carry, MB. From notes made apart from this code.
SIZES = {
    "Qwen3.5-0.8B": (0.77, 12_288, 19.5),
    "Qwen3.5-2B": (1.73, 12_288, 19.5),
    "Qwen3.5-4B": (3.11, 32_768, 51.5),
    "Qwen3.5-9B": (7.64, 32_768, 51.5),
    "Qwen3.6-27B": (17.65, 65_536, 153.9),
    "Qwen3.5-35B-A3B": (19.42, 20_480, 64.4),
    "Qwen3-Next-80B-A3B": (42.10, 24_576, 77.3),
    "Qwen3-8B": (6.07, 147_456, 0),
    "Llama-3.1-8B": (5.70, 131_072, 0),
    "Gemma-3-270m": (0.39, 3_072, 0),
    "Gemma-3-4B": (3.00, 20_480, 0),
    "Gemma-3-27B": (16.03, 81_920, 0),
    "GLM-5.2": (386.5, 95_232, 0),
    "DeepSeek-V3.2": (349.5, 85_888, 0),
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_sizes_against_the_notes(name: str) -> None:
    """To the last printed digit; 0.05 % where four digits are printed."""
    shape, (weights_gb, per_token, carry_mb) = find_model(name), SIZES[name]
    assert s.weight_bytes(shape, RANK_16) / 1e9 == pytest.approx(weights_gb, rel=5e-4, abs=0.0051)
    assert s.row_bytes_per_token(shape, 2) == per_token
    assert s.carry_bytes(shape, 2) / 1e6 == pytest.approx(carry_mb, abs=0.06)


@pytest.mark.parametrize("name", ["Qwen/Qwen3.6-27B", "qwen3.6 27b", "Qwen3.5-27B", "QWEN3_6_27B"])
def test_a_model_has_several_names(name: str) -> None:
    assert find_model(name).num_params == 26_895_998_464


@pytest.mark.parametrize("name", ["H20-3e", "h20-3e-141gb", "H20 141", "H20-3e-141"])
def test_a_gpu_has_several_names(name: str) -> None:
    assert find_gpu(name).memory_bytes == 150_754_820_096


def test_near_matches() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown model 'Qwen3.6-72B': did you mean Qwen3.6-27B"):
        find_model("Qwen3.6-72B")
    with pytest.raises(InvalidInputError, match=r"unknown GPU 'H300': did you mean .*H200"):
        find_gpu("H300")
    with pytest.raises(InvalidInputError, match=r"unknown GPU 'zzzz': the catalogue has A100-40|the catalogue has H20"):
        find_gpu("zzzz")


def test_a_users_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "mine.json"
    config = dict(catalogue("models")["Qwen3-8B"]["config"], num_hidden_layers=4)
    gpu = {"memory_bytes": 10**9, "bf16_tflops": 1.0, "memory_tb_per_s": 0.1}
    own.write_text(json.dumps({"models": {"Mine-1B": {"config": config}}, "gpus": {"My-Card": gpu}}))
    monkeypatch.setenv(CATALOGUE_VARIABLE, str(own))
    planned = plan("mine 1b", "my card", positions=2000, group_size=2, response_tokens=10)
    assert (len(planned.shape.layers), planned.ceiling_bytes) == (4, 10**9)
    assert find_model("Qwen3-8B").num_params == 8_190_735_360
    monkeypatch.setenv(CATALOGUE_VARIABLE, str(tmp_path / "absent.json"))
    with pytest.raises(InvalidInputError, match="which is no file"):
        find_model("Mine-1B")


def test_every_kind_of_source(tmp_path: Path) -> None:
    """A catalogue name, an AutoConfig object, its file, its folder and its fields are one model."""
    config = model_config("Qwen3.5-4B")
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    sources = ["Qwen3.5-4B", config, tmp_path, tmp_path / "config.json", fields, {"text_config": fields}]
    assert {find_model(source).layers for source in sources} == {find_model("Qwen3.5-4B").layers}


@pytest.mark.parametrize("field", ["hidden_size", "num_key_value_heads", "head_dim", "linear_num_value_heads"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    fields = dict(catalogue("models")["Qwen3.5-4B"]["config"])
    del fields[field]
    for source in (fields, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(InvalidInputError, match=f"has no field '{field}'"):
            find_model(source)


def test_a_missing_field_of_an_object_is_named() -> None:
    class Config:
        model_type, vocab_size, hidden_size, num_hidden_layers = "llama", 100, 64, 2
        max_position_embeddings, num_attention_heads, intermediate_size = 100, 4, 128

    with pytest.raises(InvalidInputError, match="has no field 'num_key_value_heads'"):
        find_model(Config())


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'mamba' is not a supported family; supported: llama"):
        find_model(type("Config", (), {"model_type": "mamba"})())
