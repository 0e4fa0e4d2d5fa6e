"""Kill a training run with SIGKILL at random moments, resume it, and compare with a run that nobody disturbed.

    python -m tests.kill_train --kills 10 --folder /tmp/kills      (POSIX; one line of JSON per kill)

A child process is forked for every run, so that torch and transformers are imported once. The moments are drawn
uniformly over the duration of the undisturbed run; one that falls after the end is drawn again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from workbench import Policy, TrainConfig, load_policy, train
from workbench.checkpoint import latest_checkpoint
from workbench.model_sources import ByteTokenizer, tiny_model
from workbench.train_metrics import MEASURED

TASKS = [{"prompt": f"Key {i} opens door {7 * i % 10}. Name the door.", "answer": "aeiou 0123"} for i in range(6)]
MICRO = {
    "vocab_size": 259,
    "eos_token_id": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_hidden_layers": 1,
}


def noisy_reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of the answer's letters, and noise of the global generator, whose state a checkpoint has to carry."""
    shares = [
        sum(c in right for c in text) / max(1, len(text)) for text, right in zip(completions, answer, strict=True)
    ]
    return [share + random.random() for share in shares]


def policy_of(kind: str) -> Policy:
    model = tiny_model("llama", **MICRO)
    policy = load_policy(model, lora=2) if kind == "lora" else Policy(model)
    policy.tokenizer = ByteTokenizer()
    return policy


def config_of(folder: Path) -> TrainConfig:
    return TrainConfig(
        num_steps=6,
        prompts_per_step=2,
        group_size=2,
        updates_per_batch=2,
        max_new_tokens=5,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        chunk_tokens=24,
        eval_every=4,
        checkpoint_every=1,
        output_dir=folder,
        resume=True,
        measure_memory=False,
    )


def run_in_child(kind: str, folder: Path, kill_after: float | None = None) -> tuple[bool, float]:
    """(was it killed, seconds it ran); without kill_after it must end well."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            random.seed(1)
            train(policy_of(kind), TASKS, noisy_reward, config=config_of(folder), eval_tasks=TASKS[:2])
            os._exit(0)
        except BaseException as error:
            print(f"child: {error!r}", flush=True)
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, f"the run in {folder} failed"
    return killed, time.monotonic() - started


def outcome(folder: Path) -> dict[str, Any]:
    """All that must be bitwise the same: weights, optimizer and generators, metrics but for what is measured."""
    last = latest_checkpoint(folder / "checkpoints")
    assert last is not None
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())][-1:] == [last.name]
    found: dict[str, Any] = {p.name: p.read_bytes() for p in last.iterdir() if p.suffix == ".safetensors"}
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        found[name] = [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]
    return found


def kill_and_resume(folder: Path, num_kills: int, seed: int) -> list[dict[str, Any]]:
    """One entry per kill: when it came, where the run stood, and whether the resumed run ended as the undisturbed."""
    draw = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    expected, duration = {}, {}
    for kind in ("lora", "full"):
        _, duration[kind] = run_in_child(kind, folder / kind)
        expected[kind] = outcome(folder / kind)
        assert len(expected[kind]["metrics.jsonl"]) == 12
    results: list[dict[str, Any]] = []
    while len(results) < num_kills:
        kind = ("lora", "full")[len(results) % 2]
        moment = draw.uniform(0.0, duration[kind])
        place = folder / f"killed-{len(results)}"
        shutil.rmtree(place, ignore_errors=True)
        if not run_in_child(kind, place, moment)[0]:
            continue
        last = latest_checkpoint(place / "checkpoints")
        run_in_child(kind, place)
        equal = outcome(place) == expected[kind]
        results.append({"kind": kind, "seconds": moment, "resumed_from": last and last.name, "bitwise_equal": equal})
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = kill_and_resume(options.folder, options.kills, options.seed)
    raise SystemExit(not all(result["bitwise_equal"] for result in results))


if __name__ == "__main__":
    main()
