"""On a GPU: rows in host memory, staged with prefetch, give the bits of rows on the device, in less device memory.

    python tests/gpu/check_placement.py

Exits with 0 if all checks passed, 1 if one failed, and 0 with the reason if there is no GPU. About a minute.

Not run on a GPU yet. What may fail there: gradient pages on the host are added up by the CPU, those on the device by
CUDA; for rows that several queries selected, the two orders of summation may differ (latent sparse families only).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once; without it sums have no fixed order
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from workbench import Policy, StepReport, update_step
from workbench.model_sources import tiny_model

FAMILIES = ("glm_moe_dsa", "deepseek_v32", "qwen3", "qwen3_5")


def ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed))


def run(model: Any, prompt: torch.Tensor, **options: Any) -> tuple[StepReport, dict[str, torch.Tensor]]:
    """One full-scope step without an optimizer: its report and the gradient."""
    model.zero_grad(set_to_none=True)
    responses = [ids(n, n) for n in (1, 90, 200)]
    report = update_step(
        Policy(model),
        prompt,
        responses,
        advantages=[1.0, -0.5, 0.7],
        chunk_tokens=256,
        block_tokens=128,
        **options,
    )
    return report, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(family: str, device: torch.device, prompt_tokens: int) -> list[str]:
    """What is wrong with this family's host placement; prints the figures."""
    model = tiny_model(family, num_hidden_layers=8, **_pattern(family)).to(device)
    prompt = ids(prompt_tokens, 1)
    run(model, prompt[:300], checkpoint_layers=True)  # kernels and workspaces are there before anything is counted
    resident, on_device = run(model, prompt, checkpoint_layers=True)
    staged, on_host = run(model, prompt, placement="host")
    again, repeated = run(model, prompt, placement="host")
    peaks = resident.memory["peak_bytes"], staged.memory["peak_bytes"]
    print(
        f"{family}: peak {peaks[0]:,} bytes on the device, {peaks[1]:,} with rows on the host "
        f"({staged.counters['rows_on_host_bytes']:,} bytes there; {staged.counters['layers_staged']} layers and "
        f"{staged.counters['bytes_staged']:,} bytes staged)"
    )
    problems = []
    if staged.loss != resident.loss or not _same(dict(enumerate(staged.logprobs)), dict(enumerate(resident.logprobs))):
        problems.append("loss or log-probs differ between placements")
    if not _same(on_host, on_device):
        problems.append(f"gradients differ between placements: {_differences(on_host, on_device)}")
    if not _same(repeated, on_host) or again.loss != staged.loss:
        problems.append("two runs with rows on the host differ: prefetch races with the computation")
    if peaks[1] >= peaks[0]:
        problems.append("rows on the host do not lower the device's peak")
    if staged.counters["layers_staged"] == 0 or resident.counters["layers_staged"] != 0:
        problems.append("counters do not show the staging")
    return [f"{family}: {problem}" for problem in problems]


def _pattern(family: str) -> dict[str, Any]:
    if family == "glm_moe_dsa":
        return {"indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]}
    return {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2} if family == "qwen3_5" else {}


def _same(found: dict[Any, torch.Tensor], truth: dict[Any, torch.Tensor]) -> bool:
    return found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)


def _differences(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    worst = {name: float((found[name] - truth[name]).norm() / truth[name].norm()) for name in truth if name in found}
    return dict(sorted(worst.items(), key=lambda item: -item[1])[:3])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device")
        return 0
    # Sums by atomics (index_add_, index_put_) have no fixed order otherwise, and nothing could be compared bit by bit.
    torch.use_deterministic_algorithms(True, warn_only=True)
    problems = [problem for family in FAMILIES for problem in check(family, device, options.prompt_tokens)]
    print("\n".join(problems) or "all checks passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
