"""Plans against the meter on this machine: calibrated within 5 %, uncalibrated inside their own band."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench import InvalidInputError, Policy, Tail, load_policy, plan, update_step
from workbench.calibration import calibrate
from workbench.model_sources import tiny_model
from workbench.planner import Calibration, Gpu, Plan

CPU = Gpu("this machine", 8 * 2**30, 0.05, 0.01, outside_bytes=0)
WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 5}
HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
}
# (family, its fields, LoRA rank or None, checkpoint_layers)
SETUPS = {
    "qwen3, LoRA": ("qwen3", WIDTHS, 8, False),
    "qwen3_5 hybrid, full training, layer checkpoints": ("qwen3_5", WIDTHS | HYBRID, None, True),
}
# (P, G, R, scope, chunk)
Combination = tuple[int, int, int, Any, int]
Peaks = Callable[[str, Combination], int]
COMBINATIONS: list[Combination] = [
    (769, 2, 16, "full", 128),
    (1025, 4, 16, "full", 256),
    (583, 3, 40, "full", 192),
    (513, 6, 32, "response_only", 128),
    (1025, 2, 24, "response_only", 512),
    (769, 2, 64, Tail(2), 256),
]


def options(setup: str) -> dict[str, Any]:
    _, _, rank, checkpoint_layers = SETUPS[setup]
    training = "full" if rank is None else "lora"
    return {
        "weights": "fp32",
        "training": training,
        "lora_rank": rank or 16,
        "checkpoint_layers": checkpoint_layers,
    }


@pytest.fixture(scope="module")
def calibrations() -> dict[str, Calibration]:
    return {
        name: calibrate(tiny_model(family, **fields), **options(name))
        for name, (family, fields, _, _) in SETUPS.items()
    }


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    return {
        name: load_policy(tiny_model(family, **fields), lora=rank) for name, (family, fields, rank, _) in SETUPS.items()
    }


def planned(setup: str, combination: Combination, calibration: Calibration | None) -> Plan:
    family, fields, _, _ = SETUPS[setup]
    prompt, group, response, scope, chunk = combination
    return plan(
        tiny_model(family, **fields).config, CPU, positions=prompt + response, group_size=group,
        response_tokens=response, gradient_scope=scope, chunk_tokens=chunk, calibration=calibration, **options(setup),
    )  # fmt: skip


@pytest.fixture(scope="module")
def peaks(policies: dict[str, Policy]) -> Peaks:
    """Peak of a step, run once per setup and combination."""
    return cache(lambda setup, combination: measured(policies[setup], setup, combination))


def measured(policy: Policy, setup: str, combination: Combination) -> int:
    """Peak bytes above the start of a step."""
    prompt, group, response, scope, chunk = combination
    draw = torch.Generator().manual_seed(0)
    report = update_step(
        policy,
        torch.randint(512, (prompt,), generator=draw),
        [torch.randint(512, (response,), generator=draw) for _ in range(group)],
        advantages=[1.0 if member % 2 else -1.0 for member in range(group)],
        gradient_scope=scope,
        chunk_tokens=chunk,
        checkpoint_layers=options(setup)["checkpoint_layers"],
    )
    policy.model.zero_grad(set_to_none=True)
    return report.memory["peak_bytes"]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
@pytest.mark.parametrize("setup", SETUPS)
def test_plan_against_the_meter(
    setup: str,
    combination: Combination,
    calibrations: dict[str, Calibration],
    peaks: Peaks,
) -> None:
    """Peak above the start of a step.

    Measured (torch 2.13, CPU, float32): calibrated -3.6 to +3.2 % over these twelve, the hybrid's response_only lowest.
    A peak is a count of tensors, the same on every run.
    """
    peak = peaks(setup, combination)
    calibrated = planned(setup, combination, calibrations[setup])
    assert calibrated.step_peak_bytes == pytest.approx(peak, rel=0.05)
    assert {term.origin for term in calibrated.details if term.term == "graph"} == {"measured"}
    low, high = planned(setup, combination, None).step_peak_band
    assert low <= peak <= high


def test_the_comparison_can_fail(calibrations: dict[str, Calibration], peaks: Peaks) -> None:
    """Half the chunk is another plan: the graph halves."""
    setup = "qwen3, LoRA"
    combination = COMBINATIONS[1]
    peak = peaks(setup, combination)
    other = planned(setup, (*combination[:4], combination[4] // 2), calibrations[setup])
    assert abs(other.step_peak_bytes / peak - 1) > 0.2


def test_a_calibration_is_saved_and_used_later(tmp_path: Path, calibrations: dict[str, Calibration]) -> None:
    setup, combination = "qwen3, LoRA", COMBINATIONS[0]
    calibrations[setup].save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == calibrations[setup]
    fields = {"positions": 785, "group_size": 2, "response_tokens": 16, "chunk_tokens": 128}
    config = tiny_model("qwen3", **WIDTHS).config
    later = plan(config, CPU, calibration=tmp_path / "calibration.json", **fields, **options(setup))
    assert later.step_peak_bytes == planned(setup, combination, calibrations[setup]).step_peak_bytes
    assert set(later.seconds_lines) == {"roofline", "half of peak", "calibrated"}
    assert later.seconds == later.seconds_lines["calibrated"]


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    for text in ("{}", "not JSON", '{"format": 0}'):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match="calibration"):
            Calibration.load(path)
    with pytest.raises(InvalidInputError, match="not a calibration file"):
        Calibration.load(tmp_path / "absent.json")


def test_measured_slopes_are_the_formulas(calibrations: dict[str, Calibration]) -> None:
    """A whole layer's saved bytes per token, and with layer checkpoints its input and its attention output.

    Within 4 % of the formula (measured 3.3 %): the CPU's flash kernel leaves its output in the next projection's
    layout, so 256 of 7,824 bytes are shared; tests/test_planner_graph.py compares without a kernel, and closer.
    """
    lora = calibrations["qwen3, LoRA"]
    for kind, line in lora.graph.items():
        assert line.per_token == pytest.approx(lora.formula[kind], rel=0.04)
    hybrid = calibrations["qwen3_5 hybrid, full training, layer checkpoints"]
    assert hybrid.graph["gated_delta+dense"].per_token == 128 * 4
    assert hybrid.graph["full_attention+dense"].per_token == 128 * 4 + 4 * 16 * 4 + 4 * 4


def test_another_width_is_scaled(calibrations: dict[str, Calibration]) -> None:
    """Twice the width, from this run's ratio to the formulas: a wider band, and within it.

    Measured: peak 1.4 % above the plan.
    """
    fields = WIDTHS | {"hidden_size": 256, "intermediate_size": 512}
    combination = COMBINATIONS[1]
    policy = load_policy(tiny_model("qwen3", **fields), lora=8)
    peak = measured(policy, "qwen3, LoRA", combination)
    wider = plan(
        policy.adapter.config, CPU, positions=1041, group_size=4, response_tokens=16, chunk_tokens=256,
        calibration=calibrations["qwen3, LoRA"], **options("qwen3, LoRA"),
    )  # fmt: skip
    low, high = wider.step_peak_band
    assert low <= peak <= high
    assert high / low < 1.4


def test_a_calibration_of_another_family_is_not_used(calibrations: dict[str, Calibration]) -> None:
    other = plan(
        tiny_model("llama").config, CPU, positions=785, group_size=2, response_tokens=16,
        calibration=calibrations["qwen3, LoRA"], **options("qwen3, LoRA"),
    )  # fmt: skip
    assert any("does not cover" in note for note in other.notes)
    assert "calibrated" not in other.seconds_lines


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"weights": "nf4"}, "weights='nf4' is not one of 'bf16', 'fp32'"),
        ({"lengths": (100, 256)}, "two rising multiples of 64"),
        ({"lengths": (256, 128)}, "two rising multiples of 64"),
    ],
)
def test_bad_calibrations_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        calibrate(tiny_model("qwen3").config, **bad)
