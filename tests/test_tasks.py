"""Tasks: exact lengths, the same for the same seed, an answer that the text really gives, rows accepted as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workbench.errors import InvalidInputError
from workbench.model_sources import ByteTokenizer
from workbench.rewards import exact_answer
from workbench.tasks import KINDS, check_tokenizer, encode_prompt, make_tasks, read_haystack, read_tasks
from workbench.tasks.words import KEYS, VALUES, template_words

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Words of the templates and some of the library's; everything else is unknown."""
    extra = "a to in for be if this that or an file object none return string < > assistant user".split()  # noqa: SIM905
    vocabulary = dict.fromkeys(["<unk>", "<eos>", *template_words(), *KEYS, *VALUES, *map(str, range(33)), *extra])
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")


def solve(prompt: str) -> str:
    """Reads the prompt as a person would, without knowing how it was made: the bare answer."""
    facts = re.findall(r"the code of (\w+) is (?:(that) of )?(\w+) \.", prompt)
    asked = re.search(r"question : (.*) \? answer :", prompt)
    assert asked is not None
    question = asked.group(1)
    if counted := re.fullmatch(r"how many times is there one (\w+)", question):
        return str(prompt.count(f"here is one {counted.group(1)} ."))
    if pages := re.fullmatch(r"go from page (\w+) to the last page ; what does it ask for", question):
        links = dict(re.findall(r"the page after (\w+) is (\w+) \.", prompt))
        page = pages.group(1)
        while page in links:
            page = links[page]
        key = dict(re.findall(r"the page (\w+) asks for the code of (\w+) \.", prompt))[page]
        return next(value for name, _, value in facts if name == key)
    if several := re.fullmatch(r"what are all the codes of (\w+) , in order", question):
        return " , ".join(value for name, _, value in facts if name == several.group(1))
    single = re.fullmatch(r"what is the code of (\w+)", question)
    assert single is not None
    key, direct = single.group(1), {name: (that, value) for name, that, value in facts}
    while direct[key][0]:
        key = direct[key][1]
    return direct[key][1]


@pytest.mark.parametrize("style", ["token", "sentence"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_follows_from_the_text(tokenizer: Any, kind: str, style: str):
    tasks = make_tasks(kind, 6, tokenizer=tokenizer, prompt_tokens=701, answer_style=style, seed=3)
    assert len({task["answer"] for task in tasks}) > 1
    for task in tasks:
        ids = encode_prompt(tokenizer, task["prompt"])
        assert len(ids) == 701, "one word is one token here, so the length is exact"
        assert tokenizer.unk_token_id not in ids.tolist()
        solved = solve(task["prompt"])
        assert task["answer"] == solved if style == "token" else task["answer"].endswith(f" {solved} .")
        assert exact_answer([f" {task['answer']} and more"], answer=[task["answer"]]) == [1.0]
        assert task["kind"] == kind


def test_prompts_end_where_the_answer_begins(tokenizer: Any):
    bare, sentence = (
        make_tasks("needle", 1, tokenizer=tokenizer, prompt_tokens=200, answer_style=style)[0]
        for style in ("token", "sentence")
    )
    assert re.search(r"answer : the code of \w+ is$", bare["prompt"])
    assert len(tokenizer.encode(bare["answer"])) == 1
    assert sentence["prompt"].endswith("answer :")
    chain = make_tasks("key_chain", 1, tokenizer=tokenizer, prompt_tokens=300)[0]
    assert chain["prompt"].endswith("answer :"), "the words before the answer would give the hidden question away"


@pytest.mark.parametrize("tokens", [997, 4096])
def test_lengths_of_byte_prompts(tokens: int):
    """Words of many tokens: never longer, and shorter by less than one word (of at most 80 characters here)."""
    for task in make_tasks("multi_key", 3, tokenizer=ByteTokenizer(), prompt_tokens=tokens, answer_style="sentence"):
        assert tokens - 80 < len(encode_prompt(ByteTokenizer(), task["prompt"])) <= tokens


def test_seeds(tokenizer: Any):
    def prompts(seed: int, num: int = 8) -> list[str]:
        return [t["prompt"] for t in make_tasks("needle", num, tokenizer=tokenizer, prompt_tokens=150, seed=seed)]

    assert prompts(1) == prompts(1)
    assert prompts(1, 3) == prompts(1)[:3], "a task does not depend on how many there are"
    assert not set(prompts(1)) & set(prompts(2)), "training and held-out tasks differ"


def test_depths_vary_and_can_be_set(tokenizer: Any):
    def places(**options: Any) -> list[float]:
        tasks = make_tasks("needle", 40, tokenizer=tokenizer, prompt_tokens=500, seed=1, **options)
        found = [(task["prompt"].index("the code of"), task) for task in tasks]
        assert all(abs(place / len(task["prompt"]) - task["depth"]) < 0.2 for place, task in found)
        return [task["depth"] for _, task in found]

    depths = places()
    assert min(depths) < 0.15
    assert max(depths) > 0.85
    assert places(depth=0.5) == [0.5] * 40


def test_chat_prompts_go_through_the_template(tokenizer: Any):
    tokenizer.chat_template = TEMPLATE
    try:
        task = make_tasks("needle", 1, tokenizer=tokenizer, prompt_tokens=300, chat=True)[0]
        assert task["prompt"][0]["role"] == "user"
        ids = encode_prompt(tokenizer, task["prompt"])
        assert ids.shape == (300,)
        assert tokenizer.decode(ids).endswith("< assistant >")
        continued = [*task["prompt"], {"role": "assistant", "content": "the code"}]
        assert tokenizer.decode(encode_prompt(tokenizer, continued)).endswith("< assistant > the code")
    finally:
        tokenizer.chat_template = None
    with pytest.raises(InvalidInputError, match="no chat template"):
        encode_prompt(tokenizer, task["prompt"])


def test_haystacks(tokenizer: Any, tmp_path: Path):
    plain, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("A file is in this file. An unheard word! Red is for an object.")
    rows.write_text(json.dumps({"text": "for to."}) + "\n\n" + json.dumps({"text": "to for."}) + "\n")
    hay = read_haystack([plain, rows], tokenizer)
    assert "".join(hay.words).split() == "a file is in this file . an is for an object . for to . to for .".split()  # noqa: SIM905
    assert "unheard" in "".join(read_haystack(plain, ByteTokenizer()).words)
    task = make_tasks("needle", 1, tokenizer=tokenizer, prompt_tokens=400, haystack=plain)[0]
    assert len(encode_prompt(tokenizer, task["prompt"])) == 400, "the text begins again where it ends"
    assert "class Popen" in "".join(read_haystack("sources", ByteTokenizer()).words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "needles"}, "kind='needles' is not one of needle, multi_key"),
        ({"num_tasks": 0}, "num_tasks=0"),
        ({"prompt_tokens": 12}, "prompt_tokens=12 is too short: needles and question alone have 23 tokens"),
        ({"prompt_tokens": 1.5}, "prompt_tokens=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"answer_style": "word"}, "answer_style='word'"),
        ({"num_needles": 2}, "kind 'needle' has 1 to 1 needles"),
        ({"kind": "multi_key", "num_needles": 33}, "2 to 32"),
        ({"kind": "key_chain", "num_needles": 7}, "an even number"),
        ({"depth": 1.5}, "depth=1.5 must be"),
        ({"kind": "count", "depth": 0.5}, "does not stand in one place"),
        ({"haystack": "no/such/file"}, "no/such/file cannot be read"),
        ({"haystack": []}, "give 'library'"),
        ({"tokenizer": ByteTokenizer()}, "0 of 32 values are one token"),
        ({"chat": True}, "no chat template"),
    ],
)
def test_wrong_options(tokenizer: Any, change: dict[str, Any], message: str):
    options = {"kind": "needle", "num_tasks": 1, "tokenizer": tokenizer, "prompt_tokens": 100} | change
    with pytest.raises(InvalidInputError, match=message):
        make_tasks(options.pop("kind"), options.pop("num_tasks"), **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [("\n", "no words"), ('{"text": 3}', "line 1 has no text"), ("{", "line 1 is no JSON")],
)
def test_wrong_haystack_files(tokenizer: Any, tmp_path: Path, content: str, message: str):
    path = tmp_path / "hay.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=message):
        read_haystack(path, tokenizer)


def test_rows_are_accepted_as_they_are(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "answer": "b", "level": 3}, {"prompt": [{"role": "user", "content": "c"}], "answer": "d"}]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_tasks(rows) == read_tasks(path) == read_tasks(iter(rows)) == rows
    assert read_tasks(datasets.Dataset.from_list(rows[:1])) == rows[:1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "not one row"),
        ([{"prompt": "a", "answer": "b"}, {"answer": "b"}], "row 1: `prompt` must be a text or a list of messages"),
        ([{"prompt": "  ", "answer": "b"}], "row 0: the prompt is empty"),
        ([{"prompt": [], "answer": "b"}], "row 0: the prompt is empty"),
        ([{"prompt": ["a"], "answer": "b"}], "row 0: `prompt` must"),
        ([{"prompt": "a", "answer": ""}], "row 0: the rewards need a column `answer`"),
        ([{"prompt": "a"}], "row 0: the rewards need a column `answer`"),
        (["a"], "row 0: a str, not a mapping"),
        ({"train": []}, "of a DatasetDict take one split"),
        (7, "not int"),
        ("missing.jsonl", "missing.jsonl cannot be read"),
    ],
)
def test_wrong_rows(rows: Any, message: str):
    with pytest.raises(InvalidInputError, match=message):
        read_tasks(rows, needs=("answer",))


def test_a_tokenizer_of_another_model_is_refused(tokenizer: Any):
    check_tokenizer(tokenizer, len(tokenizer))
    check_tokenizer(ByteTokenizer(), 259)
    with pytest.raises(InvalidInputError, match=f"ids up to {len(tokenizer) - 1}, the model only 101"):
        check_tokenizer(tokenizer, 101)
    with pytest.raises(InvalidInputError, match="up to 258, the model only 101"):
        check_tokenizer(ByteTokenizer(), 101)
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        check_tokenizer(None, 101)


@pytest.mark.parametrize("prompt", ["", None, 3, [], ["a"], {"role": "user"}])
def test_encode_prompt_refuses_what_is_no_prompt(tokenizer: Any, prompt: Any):
    if prompt == "":
        assert encode_prompt(tokenizer, prompt).shape == (0,)
        return
    with pytest.raises(InvalidInputError, match="a text or a list of chat messages"):
        encode_prompt(tokenizer, prompt)


def test_a_column_may_hold_an_array() -> None:
    """Columns of `datasets` do; an array has no truth value."""
    (row,) = read_tasks([{"prompt": "a", "answer": np.array([1, 2])}], needs=("answer",))
    assert row["answer"].tolist() == [1, 2]
