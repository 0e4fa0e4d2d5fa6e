"""notebooks/20_architectures.ipynb: it runs, needs no network, and measures what the planner says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from workbench import InvalidInputError
from workbench.architecture_figures import footprint_figure, growth_figure
from workbench.architecture_study import (
    ArchitectureParameters,
    Growth,
    bytes_by_kind,
    footprints,
    open_family,
    small_state,
)
from workbench.publish import find_external_addresses
from workbench.records import read_record
from workbench.run import run_notebook

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "20_architectures.ipynb"
PARAMETERS: dict[str, Any] = {
    "hybrid": "Qwen3.6-27B",
    "sparse": "GLM-5.2",
    "num_layers": 8,
    "prompt_tokens": [300, 600, 1200],
    "chunk_tokens": 150,
    "seed": 0,
}


def test_it_runs_and_keeps_what_it_shows(tmp_path: Path) -> None:
    texts = {name: str(value) for name, value in PARAMETERS.items()}
    record, folder = run_notebook(NOTEBOOK, texts, runs=tmp_path)
    assert record.status == "completed", record.error
    assert find_external_addresses((folder / "20_architectures.html").read_text(encoding="utf-8")) == []
    kept = read_record(folder / "run.json")
    assert all(check["passed"] for check in kept["evidence"]["checks"])
    results = kept["results"]["architectures"]
    assert results["bytes_per_token"]["GLM-5.2"] == 95_232
    assert results["bytes_per_token"]["Qwen3.6-27B"] == 65_536
    for name, growth in results["growth"].items():
        first, last = growth[0], growth[-1]
        assert last["rows"] * first["positions"] == first["rows"] * last["positions"], "rows are proportional"
        assert last["carry"] == first["carry"]
        assert (first["carry"] > 0) == (name == "Qwen3.6-27B")
        # What is not resident: measured +1 % or less from 300 to 1,200 tokens.
        assert last["workspace"] <= 1.05 * first["workspace"]


@pytest.mark.parametrize("name", ["Qwen3.6-27B", "GLM-5.2", "DeepSeek-V3.2", "Qwen3.5-35B-A3B"])
def test_small_models_keep_the_kinds_of_layers_and_what_each_holds(name: str) -> None:
    parameters = ArchitectureParameters(**PARAMETERS | {"hybrid": name, "prompt_tokens": [40, 80], "num_layers": 4})
    family = open_family(name, parameters)
    kinds = bytes_by_kind(family, small_state(family, parameters))
    assert [kind.kind for kind in kinds] == list(dict.fromkeys(layer.mixer.kind for layer in family.shape.layers))
    assert all(kind.agrees for kind in kinds)
    assert sum(kind.num_layers for kind in kinds) == len(family.shape.layers)
    assert family.small_shape.num_params < 30e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "greater than or equal to 4"),
        ({"prompt_tokens": [7]}, "at least 2"),
        ({"hybird": "x"}, "Extra"),
    ],
)
def test_wrong_parameters_stop_the_notebook(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ArchitectureParameters(**PARAMETERS | change)


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"'GLM-6' is not in the model catalogue; there are: .*GLM-5\.2"):
        open_family("GLM-6", ArchitectureParameters(**PARAMETERS))


def test_figures_show_every_model_and_part() -> None:
    found = footprints()
    figure = footprint_figure(found)
    assert {bar.name for bar in figure.data} == {
        "full attention", "latent attention with an index", "latent attention, shared index"
    }  # fmt: skip
    assert all(len(bar.y) == len(found) for bar in figure.data)
    glm = next(footprint for footprint in found if footprint.name == "GLM-5.2")
    assert glm.by_kind == {"latent_indexed": 21 * 1408, "latent_shared": 57 * 1152}
    assert glm.gradient_bytes == 4 * 78 * 576, "index keys take no gradient"
    points = [Growth(n, 100 * n, carry, 0, 5000, 1.0) for n, carry in ((10, 0), (20, 0))]
    names = [line.name for line in growth_figure({"a": points, "b": points}).data]
    assert names == ["rows, a", "workspace, a", "rows, b", "workspace, b"], "a carry of nothing is left out"
