"""The long document and its question: right length, right answer, a reward that tells answers apart."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from workbench.documents import answer_similarity, library_task
from workbench.errors import InvalidInputError
from workbench.model_sources import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize("prompt_tokens", [700, 4096, 40_000])
def test_the_prompt_has_the_length_asked_for_and_ends_in_the_question(prompt_tokens):
    task = library_task(TOKENIZER, prompt_tokens)
    assert task.prompt_ids.shape == (prompt_tokens,)
    assert task.prompt_ids.dtype == torch.int64
    text = TOKENIZER.decode(task.prompt_ids[1:])
    assert text.endswith(task.question)
    assert task.document_tokens + len(task.question.encode()) == prompt_tokens
    # The answer stands in the document, near its beginning, and is not given away by the question.
    assert text.index(task.answer) < 200
    assert task.answer not in task.question


def test_the_answer_is_what_python_itself_says():
    task = library_task(TOKENIZER, 700)
    signature = str(inspect.signature(subprocess.Popen))
    given = task.question.rsplit("Answer: ", 1)[1]
    assert signature.startswith(f"({given} {task.answer}, ")


def test_the_document_is_the_same_in_every_process():
    code = (
        "import hashlib\n"
        "from workbench.documents import library_task\n"
        "from workbench.model_sources import ByteTokenizer\n"
        "print(hashlib.sha256(bytes(library_task(ByteTokenizer(), 300_000).prompt_ids[1:].tolist())).hexdigest())"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout


def test_lengths_that_cannot_be_made_are_refused_with_the_limit():
    with pytest.raises(InvalidInputError, match="too short, give at least") as short:
        library_task(TOKENIZER, 100)
    least = int(str(short.value).rsplit(" ", 1)[1])
    assert library_task(TOKENIZER, least).prompt_ids.shape == (least,)
    with pytest.raises(InvalidInputError, match="longer than the library, at most"):
        library_task(TOKENIZER, 50_000_000)


def test_the_reward_has_trls_signature_and_orders_answers():
    task = library_task(TOKENIZER, 700)
    right, near, far = task.answer, task.answer.replace("stdin", "input"), "I do not know"
    completions = [f" {right}, close_fds=True\nQuestion:", f"{near}\n", far, "", f"\n{right}", f"{far}\n{right}"]
    rewards = answer_similarity(["p"] * 6, completions, answer=[right] * 6, other_column=[0] * 6)
    assert rewards[0] == rewards[4] == 1.0
    assert 1.0 > rewards[1] > rewards[2] > rewards[3] == 0.0
    assert rewards[5] == rewards[2], "only the first line counts"
    with pytest.raises(InvalidInputError, match="1 prompts, 2 completions and 1 answers"):
        answer_similarity(["p"], ["a", "b"], answer=["a"])
