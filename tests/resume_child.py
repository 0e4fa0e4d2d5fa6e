"""One run of a LoRA policy in a process of its own: `python -m tests.resume_child FOLDER STEP`, -1 to let it end.

At the reward of STEP the process ends as by SIGKILL. The same command resumes what is in the folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from workbench import TrainConfig, load_policy, train
from workbench.model_sources import ByteTokenizer, tiny_model

TASKS = [{"prompt": f"Key {i} opens door {7 * i % 10}.", "answer": {"a", "e", f"{i}"}} for i in range(4)]


def main(folder: Path, dies_at: int) -> None:
    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return [float(place) for place, _ in enumerate(completions)]

    model = tiny_model("llama", vocab_size=259, eos_token_id=257, hidden_size=32, num_hidden_layers=1)
    policy = load_policy(model, lora={"r": 2, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]})
    policy.tokenizer = ByteTokenizer()
    config = TrainConfig(
        num_steps=3, prompts_per_step=2, group_size=2, max_new_tokens=3, chunk_tokens=16, learning_rate=1e-2,
        checkpoint_every=1, output_dir=folder, resume=True, measure_memory=False,
    )  # fmt: skip
    train(policy, TASKS, reward, config=config)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
