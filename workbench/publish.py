"""An executed notebook as one HTML file that opens anywhere: no server, no network, no kernel."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.pictures import figure_png

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
_WIDGET = "application/vnd.jupyter.widget-view+json"
_LASTING = {"text/html", "image/png", "image/svg+xml"}
_ACTIVE = re.compile(r"<(script|iframe|style|object)\b", re.I)  # what GitHub prints as text or drops
_FIGURE_CLASS = "longstraw-figure"
_BASIC_BUNDLE = Path(__file__).resolve().parents[1] / "data" / "vendor" / "plotly-basic-4.1.1.min.js.gz"
_BASIC_TRACES = {"scatter", "bar", "pie"}
_DRAW_FIGURES = """
<script type="module">
const packed = Uint8Array.from(atob("@PLOTLY@"), (c) => c.charCodeAt(0));
const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const library = document.createElement("script");
library.textContent = await new Response(stream).text();
document.head.append(library);
for (const place of document.querySelectorAll(".longstraw-figure")) {
  const { data, layout } = JSON.parse(place.querySelector("script").textContent);
  await Plotly.newPlot(place, data, layout, { responsive: true, displayModeBar: false });
}
</script>
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
    figures = _figures_to_html(page)
    html, _ = HTMLExporter(raw_template=_TEMPLATE, embed_images=True).from_notebook_node(page)
    if figures:
        # At the end of the page, so that text and tables are there first.
        head, _, tail = html.rpartition("</body>")
        html = f"{head}{_plotly_script(figures)}\n</body>{tail}"
    external = find_external_addresses(html)
    if external:
        raise ExternalAddressError(f"{title}: the page would load {len(external)} things, first {external[0][:200]}")
    return html


def _figures_to_html(page: Any) -> list[dict[str, Any]]:
    """Gives every plotly figure, saved as data only, an HTML form that the page's script fills; returns the figures.

    The notebook file stays small and any front end with a plotly renderer shows it; the page gets the library once.
    """
    outputs = [output for cell in page.cells for output in cell.get("outputs", []) if _PLOTLY in output.get("data", {})]
    figures = []
    for output in outputs:
        figure = output.data.pop(_PLOTLY)
        figures.append(figure)
        content = {"data": figure["data"], "layout": figure["layout"]}
        data = json.dumps(content, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
        output.data["text/html"] = f'<div class="{_FIGURE_CLASS}"><script type="application/json">{data}</script></div>'
    return figures


def _plotly_script(figures: Sequence[Mapping[str, Any]]) -> str:
    """The script that draws the figures, with plotly.js in it, compressed: the basic bundle if it knows all traces."""
    kinds = {trace.get("type", "scatter") for figure in figures for trace in figure["data"]}
    if kinds <= _BASIC_TRACES:
        packed = _BASIC_BUNDLE.read_bytes()
    else:
        from plotly.offline import get_plotlyjs

        packed = gzip.compress(get_plotlyjs().encode("utf-8"), mtime=0)
    return _DRAW_FIGURES.replace("@PLOTLY@", base64.b64encode(packed).decode("ascii"))


# --- the notebook itself, for other hosts ------------------------------------------------------------------------


def detach_widgets(notebook: Any) -> None:
    """Removes the live form of widgets, in place, from outputs that also have another: their kernel is gone."""
    notebook.metadata.pop("widgets", None)
    for output in _outputs(notebook):
        if output.data.keys() & _LASTING:
            output.data.pop(_WIDGET, None)


def github_notebook(notebook: Any) -> Any:
    """A copy of an executed notebook that shows on GitHub and in other places that run no scripts: pictures and text.

    Widgets keep their picture, plotly figures get one, HTML with scripts goes; plain HTML, as tables are, stays.
    """
    page = copy.deepcopy(notebook)
    page.metadata.pop("widgets", None)
    for output in _outputs(page):
        figure = output.data.pop(_PLOTLY, None)
        picture = figure_png(figure) if figure is not None else None
        if picture is not None:
            output.data["image/png"] = base64.b64encode(picture).decode("ascii")
        output.data.pop(_WIDGET, None)
        if "image/png" in output.data or _ACTIVE.search(_joined(output.data.get("text/html", ""))):
            output.data.pop("text/html", None)
        if not output.data:
            output.data["text/plain"] = "(interactive: see the HTML page)"
    return page


def _outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "".join(text)


def write_html(notebook: Any, path: Path, *, title: str) -> None:
    """Writes `notebook_html` to `path`."""
    path.write_text(notebook_html(notebook, title=title), encoding="utf-8")


def write_github(notebook: Any, path: Path) -> None:
    """Writes `github_notebook` to `path`."""
    import nbformat

    nbformat.write(github_notebook(notebook), path)
