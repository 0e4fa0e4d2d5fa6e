"""An executed notebook as one HTML file that opens anywhere: no server, no network, no kernel."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError

# The stock template loads require.js, MathJax, mermaid and the widget manager from content delivery networks, and has
# one fixed theme. This one empties those blocks and follows the reader's system from light to dark.
_TEMPLATE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block notebook_css -%}
{{ super() }}
{{ resources.include_css("static/theme-dark.css")
   | replace('<style', '<style media="(prefers-color-scheme: dark)"') | safe }}
<style>
  :root { color-scheme: light dark; }
  body.jp-Notebook { background: var(--jp-layout-color0); max-width: 1000px; margin: 0 auto; }
  .jp-RenderedHTMLCommon, .jp-OutputArea-output { overflow-x: auto; }
  .jp-OutputArea-output { min-width: 0; }
  /* Figures bring one text colour for all themes; here the theme's own is known. */
  .js-plotly-plot :is(.cartesianlayer, .infolayer) text { fill: var(--jp-content-font-color1) !important; }
  @media (max-width: 700px) {  /* a phone: the prompts' column is worth more as text */
    .jp-InputPrompt, .jp-OutputPrompt { display: none; }
    body.jp-Notebook { padding: 4px; }
  }
</style>
{%- endblock -%}
"""
_PLOTLY = "application/vnd.plotly.v1+json"
# A figure is drawn while the page is still being laid out, so its first width may be wrong.
_FIT_FIGURES = """
addEventListener("load", () => document.querySelectorAll(".js-plotly-plot").forEach(plot => Plotly.Plots.resize(plot)));
"""
_LOADING_ATTRIBUTES = {"src", "srcset", "data", "poster", "background"}
_ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.I)
_STYLE_LOADS = re.compile(r"(?:@import\s+|url\(\s*)[\"']?\s*(?:https?:)?//[^\s\"')]+", re.I)
_SCRIPT_IMPORTS = re.compile(r"\bimport\b(?:[\w\s{},*$]*\bfrom\b)?\s*\(?\s*[\"'`](?:https?:)?//[^\"'`]+")


class ExternalAddressError(WorkbenchError, RuntimeError):
    """A page that should open with no network would load something from elsewhere."""


class _Loads(HTMLParser):
    """Collects what a browser fetches from another host while it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style"):
            self._inside = tag
        for name, value in attrs:
            loads = name in _LOADING_ATTRIBUTES or (tag == "link" and name == "href")
            if value and loads and _ELSEWHERE.match(value):
                self.found.append(f"<{tag} {name}={value.strip()}>")
            elif value and name == "style":
                self.found += _STYLE_LOADS.findall(value)

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.found += _STYLE_LOADS.findall(data)
        elif self._inside == "script":
            self.found += _SCRIPT_IMPORTS.findall(data)


def find_external_addresses(html: str) -> list[str]:
    """Every place where a browser would fetch something from another host on opening `html`.

    Looks at loading attributes, style sheets and module imports. Links are followed by people, and an address in the
    text of a script, as in a bundled library's comments, loads nothing by itself.
    """
    parser = _Loads()
    parser.feed(html)
    parser.close()
    return parser.found


def notebook_html(notebook: Any, *, title: str) -> str:
    """The notebook as one self-contained page. Raises ExternalAddressError if anything in it would need a network."""
    from nbconvert import HTMLExporter

    page = copy.deepcopy(notebook)
    # Saved widget state would call for the widget manager; what every output also holds as HTML or image is shown.
    page.metadata.pop("widgets", None)
    page.metadata["title"] = title
    has_figures = _figures_to_html(page)
    html, _ = HTMLExporter(raw_template=_TEMPLATE, embed_images=True).from_notebook_node(page)
    if has_figures:
        from plotly.offline import get_plotlyjs

        html = html.replace("</head>", f"<script>{get_plotlyjs()}</script>\n</head>", 1)
        html = html.replace("</body>", f"<script>{_FIT_FIGURES}</script>\n</body>", 1)
    external = find_external_addresses(html)
    if external:
        raise ExternalAddressError(f"{title}: the page would load {len(external)} things, first {external[0][:200]}")
    return html


def _figures_to_html(page: Any) -> bool:
    """Gives every plotly figure, saved as data only, an HTML form that draws it; True if there was one.

    The notebook file stays small and any front end with a plotly renderer shows it; the page gets the library once.
    """
    from plotly.io import to_html

    outputs = [output for cell in page.cells for output in cell.get("outputs", []) if _PLOTLY in output.get("data", {})]
    for output in outputs:
        figure = output.data.pop(_PLOTLY)
        output.data["text/html"] = to_html(
            {"data": figure["data"], "layout": figure["layout"]},
            config={"responsive": True, "displayModeBar": False},
            include_plotlyjs=False,
            full_html=False,
            auto_play=False,
            validate=False,
        )
    return bool(outputs)


def write_html(notebook: Any, path: Path, *, title: str) -> None:
    """Writes `notebook_html` to `path`."""
    path.write_text(notebook_html(notebook, title=title), encoding="utf-8")
