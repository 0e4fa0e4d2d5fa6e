"""An interrupted prompt walk goes on where it was, to the bit; a damaged or foreign checkpoint is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import tiny_policy, token_ids
from workbench import InvalidInputError, Policy, StepReport, Tail, WalkCheckpoint, update_step
from workbench import prompt_gradient as prompt_gradient_module

CHUNK, PROMPT = 16, 101  # six whole chunks and a rest of 4


def step(policy: Policy, folder: Path | None, **options: Any) -> StepReport:
    checkpoint = None if folder is None else WalkCheckpoint(folder, every_chunks=1)
    given: dict[str, Any] = {"advantages": [1.0, -0.5], "chunk_tokens": CHUNK, "walk_checkpoint": checkpoint}
    return update_step(policy, token_ids(PROMPT), [token_ids(9, 1), token_ids(14, 2)], **(given | options))


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: p.grad for name, p in policy.trainable_parameters() if p.grad is not None}


def assert_same_step(policy: Policy, report: StepReport, folder: Path, **options: Any) -> None:
    truth_policy = Policy(policy.model)
    resumed = {name: gradient.clone() for name, gradient in gradients(policy).items()}
    policy.model.zero_grad(set_to_none=True)
    truth = step(truth_policy, None, **options)
    found = gradients(truth_policy)
    assert resumed.keys() == found.keys()
    assert all(torch.equal(resumed[name], found[name]) for name in found), "bitwise"
    assert sum(float(g.abs().sum()) for g in found.values()) > 0.1, "a gradient worth comparing"
    assert report.loss == truth.loss
    assert report.metrics == truth.metrics
    assert all(torch.equal(a, b) for a, b in zip(report.logprobs, truth.logprobs, strict=True))
    # a walk that begins anew stages a layer more, and what ran before the interruption ran in another call
    same = [name for name in truth.counters if name not in ("layers_staged", "bytes_staged", "kernel_calls")]
    assert {n: report.counters[n] for n in same} == {n: truth.counters[n] for n in same}
    assert not list(folder.glob("walk*")), "a finished step leaves no checkpoint"


def interrupt_after(monkeypatch: pytest.MonkeyPatch, num_chunks: int) -> list[int]:
    """Ctrl-C in the middle of the chunk after so many; returns the list of chunks that began."""
    began: list[int] = []
    real = prompt_gradient_module.run_segment

    def run_segment(policy: Policy, segment: Any, *args: Any, **options: Any) -> Any:
        began.append(segment.start)
        live = real(policy, segment, *args, **options)
        if len(began) == num_chunks + 1:
            raise KeyboardInterrupt
        return live

    monkeypatch.setattr(prompt_gradient_module, "run_segment", run_segment)
    return began


@pytest.mark.parametrize(
    ("family", "num_chunks"), [("qwen3", 4), ("qwen3_5", 0), ("qwen3_5", 1), ("qwen3_5", 4), ("glm_moe_dsa", 4)]
)
def test_ctrl_c_and_on(family: str, num_chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(family)
    began = interrupt_after(monkeypatch, num_chunks)
    with pytest.raises(KeyboardInterrupt):
        step(policy, tmp_path)
    assert gradients(policy) == {}, "gradients are as before the call"
    assert len(began) == num_chunks + 1
    report = step(policy, tmp_path)
    assert began[num_chunks + 1 :] == list(range(0, PROMPT - 1, CHUNK))[::-1][num_chunks:], "goes on, not anew"
    monkeypatch.undo()
    assert_same_step(policy, report, tmp_path)


@pytest.mark.parametrize("options", [{"gradient_scope": Tail(3)}, {"checkpoint_layers": True, "placement": "host"}])
def test_other_scopes_and_placements(options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy("qwen3_5")
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        step(policy, tmp_path, **options)
    report = step(policy, tmp_path, **options)
    monkeypatch.undo()
    assert_same_step(policy, report, tmp_path, **options)


def test_earlier_gradients_are_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy("qwen3")
    step(policy, None)
    once = {name: gradient.clone() for name, gradient in gradients(policy).items()}
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        step(policy, tmp_path)
    step(policy, tmp_path)
    assert all(torch.equal(gradient, 2 * once[name]) for name, gradient in gradients(policy).items())


CHILD = """
import os, signal, sys
from pathlib import Path
import torch
from tests import test_walk_checkpoint as t
torch.set_num_threads(1)
t.interrupt_after_kill(int(sys.argv[2]))
t.step(t.tiny_policy("qwen3_5"), Path(sys.argv[1]))
"""


def interrupt_after_kill(num_chunks: int) -> None:
    """kill -9 on this process in the middle of the chunk after so many."""
    count, real = iter(range(10**6)), prompt_gradient_module.run_segment

    def run_segment(*args: Any, **options: Any) -> Any:
        live = real(*args, **options)
        if next(count) == num_chunks:
            os.kill(os.getpid(), signal.SIGKILL)
        return live

    prompt_gradient_module.run_segment = run_segment  # type: ignore[assignment]


def test_kill_9_and_another_process_goes_on(tmp_path: Path) -> None:
    """The weights are recognised by their content: a new process has another object and counts versions anew."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the child's: another number of threads sums in another order
    try:
        done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), "3"], capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        manifest = json.loads((tmp_path / "walk.json").read_text())
        assert manifest["position"] == 64
        policy = tiny_policy("qwen3_5")
        assert_same_step(policy, step(policy, tmp_path), tmp_path)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        step(tiny_policy("qwen3_5"), tmp_path)
    monkeypatch.undo()
    return tmp_path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"advantages": [1.0, 0.5]}, "advantages"),
        ({"chunk_tokens": 32}, "schedule"),
        ({"gradient_scope": Tail(2)}, "gradient_scope"),
    ],
)
def test_another_steps_walk_is_refused(change: Any, named: str, interrupted: Path) -> None:
    before = sorted(path.read_bytes() for path in interrupted.iterdir())
    policy = tiny_policy("qwen3_5")
    with pytest.raises(InvalidInputError, match=rf"another step \(its {named} differs\)"):
        step(policy, interrupted, **change)
    assert sorted(path.read_bytes() for path in interrupted.iterdir()) == before, "nothing is lost"


def test_other_weights_are_refused(interrupted: Path) -> None:
    policy = tiny_policy("qwen3_5")
    with torch.no_grad():
        policy.model.lm_head.weight[3, 5] += 1e-3
    with pytest.raises(InvalidInputError, match=r"its weights differs"):
        step(policy, interrupted)


def test_a_damaged_checkpoint_is_refused(interrupted: Path) -> None:
    policy = tiny_policy("qwen3_5")
    (file,) = interrupted.glob("*.pt")
    whole = file.read_bytes()
    flipped = whole[:700] + bytes([whole[700] ^ 1]) + whole[701:]
    for damaged in (whole[: len(whole) // 2], flipped, b""):
        file.write_bytes(damaged)
        with pytest.raises(InvalidInputError, match=r"is damaged .*SHA-256"):
            step(policy, interrupted)
    file.unlink()
    with pytest.raises(InvalidInputError, match="is damaged"):
        step(policy, interrupted)
    file.write_bytes(whole)
    manifest = interrupted / "walk.json"
    text = manifest.read_text()
    manifest.write_text(text[: len(text) // 2])
    with pytest.raises(InvalidInputError, match=r"walk\.json is damaged"):
        step(policy, interrupted)
    manifest.write_text(text)
    assert_same_step(policy, step(policy, interrupted), interrupted)


def test_options_that_reach_nothing_are_errors(tmp_path: Path) -> None:
    policy = tiny_policy("qwen3")
    with pytest.raises(InvalidInputError, match="walks no prompt"):
        step(policy, tmp_path, gradient_scope="response_only")
    with pytest.raises(InvalidInputError, match=r"every_chunks=0"):
        WalkCheckpoint(tmp_path, every_chunks=0)
    with pytest.raises(InvalidInputError, match="folder's path"):
        step(policy, None, walk_checkpoint=7)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="is a file"):
        step(policy, tmp_path / "file")
