"""JupyterLab with a live kernel: Python observes the slider; an untrusted notebook shows picture and table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from tests.browser.conftest import ARTIFACTS
from widgets import GroupSerialization

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
MAKE = """from pathlib import Path
from widgets import GroupSerialization
w = GroupSerialization()
w.observe(lambda change: Path("seen.txt").write_text(str(change["new"])), "group_size")
w"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address and the folder of a JupyterLab of our own."""
    folder, state = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("jupyter")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JUPYTER_CONFIG_DIR": str(state / "config"),
        "JUPYTER_DATA_DIR": str(state / "data"),
        "JUPYTER_RUNTIME_DIR": str(state / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(state / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces"),
    }
    log = (state / "log.txt").open("w")
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--port=0", "--ip=127.0.0.1", "--allow-root"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}", "--LabApp.news_url=None"]
    process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield _address(process, state / "log.txt"), folder
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()


def _address(process, log):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", log.read_text())
        if found and found[1] != "0":
            return found[0].rstrip("/")
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start: {log.read_text()[-2000:]}")


def _write(folder, name, cell):
    node = nbformat.v4.new_notebook(cells=[cell])
    node.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(node, folder / name)


def _open(browser, address, name):
    """The notebook in JupyterLab; whatever is not on this machine is refused."""
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    context.route(lambda url: not url.startswith((address, "data:", "blob:")), lambda route: route.abort())
    page = context.new_page()
    page.goto(f"{address}/lab/tree/{name}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=90_000)
    return page


def test_python_observes_what_the_keyboard_does(browser, lab, artifacts):
    address, folder = lab
    _write(folder, "live.ipynb", nbformat.v4.new_code_cell(MAKE))
    page = _open(browser, address, "live.ipynb")
    page.get_by_text("| Idle").wait_for(timeout=90_000)  # a cell run before its kernel is there does nothing
    page.locator(".jp-Notebook .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    slider = page.locator('.lsw [name="group_size"]')
    slider.wait_for(timeout=120_000)
    says = page.locator(".lsw-says").text_content()
    assert "With 8 responses" in says
    slider.focus()
    page.keyboard.press("ArrowRight")  # which JupyterLab keeps for itself unless the input says otherwise
    assert "With 12 responses" in page.locator(".lsw-says").text_content()
    seen = folder / "seen.txt"
    deadline = time.monotonic() + 30
    while not (seen.exists() and seen.read_text()) and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    page.screenshot(path=artifacts / "jupyterlab-live.png")
    page.context.close()
    assert seen.read_text() == "12"


def test_an_untrusted_notebook_shows_picture_and_table(browser, lab, artifacts):
    address, folder = lab
    widget = GroupSerialization()
    data, _ = widget._repr_mimebundle_()
    output = nbformat.v4.new_output("execute_result", data, execution_count=1)
    _write(folder, "sent.ipynb", nbformat.v4.new_code_cell("w", outputs=[output], execution_count=1))
    page = _open(browser, address, "sent.ipynb")
    table = page.locator(".jp-OutputArea-output table")
    table.wait_for(timeout=60_000)
    rows = table.locator("tbody tr").evaluate_all("all => all.map(r => [...r.cells].map(c => c.textContent))")
    image = page.locator(".jp-OutputArea-output img")
    assert image.evaluate("e => e.naturalWidth") > 500
    assert page.locator(".lsw").count() == 0, "nothing ran that the reader did not trust"
    page.screenshot(path=artifacts / "jupyterlab-untrusted.png")
    page.context.close()
    assert rows == [list(row) for row in widget.view().table.rows]


def test_artifacts_are_not_in_the_repository(artifacts):
    assert ROOT not in artifacts.resolve().parents or os.environ.get(ARTIFACTS)
