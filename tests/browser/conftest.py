"""One chromium for all browser tests, on a machine that has one; every request to a network is refused and counted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.widgets.examples import example_widgets

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARTIFACTS = "LONGSTRAW_TEST_ARTIFACTS"  # a folder to keep the screenshots in


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    # A package's fixture is closed before other tests of this process begin: playwright's loop would disturb theirs.
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Any]]:
    """open_page(path, width=1000, color_scheme="light") -> a page; then: no request went out, no error came up."""
    contexts, refused, errors = [], [], []

    def open_one(path: Path, *, width: int = 1000, color_scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=color_scheme)
        contexts.append(context)

        def refuse(route: Any) -> None:
            refused.append(route.request.url)
            route.abort()

        context.route(lambda url: not url.startswith(("file:", "data:", "blob:", "about:")), refuse)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert refused == []
    assert errors == []


@pytest.fixture(scope="package")
def examples(tmp_path_factory):
    return example_widgets(tmp_path_factory.mktemp("widgets"))


@pytest.fixture(scope="package")
def artifacts(tmp_path_factory) -> Path:
    """Where screenshots go, to be looked at; never in git."""
    kept = os.environ.get(ARTIFACTS)
    folder = Path(kept) if kept else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def changed(page: Any) -> Iterator[None]:
    """What happens inside must change the picture."""
    before = page.locator(".lsw-panels").inner_html()
    yield
    assert page.locator(".lsw-panels").inner_html() != before
