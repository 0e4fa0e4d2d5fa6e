"""Saved adapters load in plain PEFT and here, in every family, and foreign files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.helpers import Snapshot, token_ids, train_adapter
from workbench import InvalidInputError, load_policy
from workbench.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_tensors, save_adapter
from workbench.model_sources import TINY_FAMILIES, tiny_model

IDS = token_ids(20)[None]
EXPERTS = {"r": 2, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def trained(family: str, lora: Any = 2) -> Any:
    model = load_policy(tiny_model(family), lora=lora).model
    train_adapter(model)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


@pytest.mark.parametrize(
    ("family", "lora"),
    [*((family, 2) for family in TINY_FAMILIES), ("qwen3_next", EXPERTS), ("glm_moe_dsa", EXPERTS)],
    ids=lambda value: value if isinstance(value, str) else "experts" if value is EXPERTS else "linear",
)
def test_a_saved_adapter_loads_in_plain_peft_and_here(family: str, lora: Any, tmp_path: Path) -> None:
    model = trained(family, lora)
    save_adapter(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {ADAPTER_WEIGHTS, ADAPTER_CONFIG}
    plain = PeftModel.from_pretrained(tiny_model(family), tmp_path)  # warnings are errors
    # where PEFT translates names, modules are adapted through their weight: measured <= 6e-6 at logits of order one
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=3e-5)
    here = load_policy(tiny_model(family), lora=tmp_path).model
    assert torch.equal(logits(here), logits(model))
    mine = adapter_tensors(model)
    assert all(torch.equal(tensor, mine[name]) for name, tensor in adapter_tensors(here).items())
    assert {n for n, p in here.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save_adapter(trained("llama"), tmp_path)
    with pytest.raises(InvalidInputError, match=r"belongs to another model: .* has shape"):
        load_policy(tiny_model("llama", hidden_size=32), lora=tmp_path)
    with pytest.raises(InvalidInputError, match=r"does not fit this model|belongs to another model"):
        load_policy(tiny_model("qwen3_5"), lora=tmp_path)
    model = trained("llama")
    before = Snapshot(model)
    with pytest.raises(InvalidInputError, match="has an adapter already"):
        load_policy(model, lora=tmp_path)
    assert before.differences() == []


@pytest.mark.parametrize("damage", ["truncated", "missing", "no weights", "foreign configuration"])
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    save_adapter(trained("llama"), tmp_path)
    weights, config = tmp_path / ADAPTER_WEIGHTS, tmp_path / ADAPTER_CONFIG
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no weights":
        weights.write_text("hello")
    elif damage == "missing":
        weights.unlink()
    else:
        config.write_text(json.dumps({"hello": 1}))
    with pytest.raises(InvalidInputError, match=str(tmp_path)):
        load_policy(tiny_model("llama"), lora=tmp_path)
