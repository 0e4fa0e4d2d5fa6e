"""On GPUs: ranks against one process, all cases of tests/ranks_cases.py, on the GPU's own kernels.

    python tests/gpu/check_ranks.py

One GPU: two ranks share it and talk through gloo and host memory (NCCL wants a GPU for each rank), so the GPU's
kernels are checked and NCCL is not. Several GPUs: NCCL, with 2 ranks and with as many as there are, up to 8; where
there are 4, experts over half of them. Exits with 0 if all checks passed, 1 if one failed, and 0 with the reason if
there is no GPU. About three minutes for each size. Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from workbench.errors import RankFailedError
from workbench.launch import launch

FLOAT64_BOUND, FLOAT32_BOUND = 1e-11, 5e-5  # CPU: 7e-14 and 7.7e-6; a GPU's sums have another order


def problems_of(name: str, found: dict[str, Any]) -> list[str]:
    """What is wrong with one case's measurements."""
    if "failed" in found:
        return [f"{name}: {found['failed']}"]
    bound = FLOAT32_BOUND if "float32" in name else 1e-9 if "AdamW" in name else FLOAT64_BOUND
    wrong = []
    if "forgetful" in name or "refused" in name:
        return []
    if isinstance(found.get("error"), float) and not found["error"] <= bound:
        wrong.append(f"{name}: error {found['error']:.1e} > {bound:.0e}")
    if found.get("replicas_differ"):
        wrong.append(f"{name}: {found['replicas_differ']} replicated tensors differ after 3 updates")
    if found.get("counted") != found.get("predicted"):
        wrong.append(f"{name}: {found['counted']} bytes sent, the formula says {found['predicted']}")
    if found.get("same_ids") is False:
        wrong.append(f"{name}: other ids than one process (float32 rounding may do that; look at logprob_error)")
    if found.get("apart", 0.0) > 1e-9 * found.get("moved", 0.0):
        wrong.append(f"{name}: weights are {found['apart']:.1e} from one process after moving {found['moved']:.1e}")
    if found.get("differences"):
        wrong.append(f"{name}: lines differ from one process: {'; '.join(found['differences'][:3])}")
    if found.get("bitwise") is False or found.get("lines_equal") is False:
        wrong.append(f"{name}: the resumed run ended elsewhere")
    return wrong


def check(ranks: int) -> list[str]:
    """All cases of a world of `ranks` processes on the GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = launch(
                "tests.ranks_cases:run",
                {"debug": False},
                ranks=ranks,
                folder=Path(folder),
                environment={"RANKS_DEVICE": "cuda"},
            )
        except RankFailedError as error:
            return [f"{ranks} ranks: {error}"]
    for name, found in done.values[0].items():
        print(f"{ranks} ranks, {name}: {found.get('error', '')}")
    return [f"{ranks} ranks, {p}" for name, found in done.values[0].items() for p in problems_of(name, found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device")
        return 0
    gpus = torch.cuda.device_count()
    print(f"{gpus} GPU(s): {'NCCL' if gpus > 1 else 'gloo through host memory'}")
    problems = [problem for ranks in sorted({2, min(gpus, 8)} - {1}) for problem in check(ranks)]
    print("\n".join(problems) or "all checks passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
