"""A widget as HTML that needs neither kernel nor network: static picture and table, and a script that takes over.

Where scripts run, the widget's own JavaScript replaces the static part by the interactive one. Where they do not (an
untrusted notebook, a mail reader), picture and table stay.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from widgets.view import Table, View

_FOLDER = Path(__file__).resolve().parent
_IMPORT_END = '} from "./shared.js";\n'
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }} body {{ margin: 12px auto; max-width: 1100px; padding: 0 10px; }}</style>
</head>
<body>
{body}
</body>
</html>
"""


@cache
def module_source(name: str) -> str:
    """The widget's ES module with the shared one in it: a page and a kernel's message are one file each."""
    shared = (_FOLDER / "shared.js").read_text(encoding="utf-8")
    own = (_FOLDER / f"{name}.js").read_text(encoding="utf-8")
    head, _, body = own.partition(_IMPORT_END)
    return f"{shared.replace('export function', 'function')}\n{head.partition('import {')[0]}{body}"


def fragment(*, name: str, title: str, view: View, picture: bytes, state: Mapping[str, Any]) -> str:
    """The widget inside a page or a notebook's output. state: what its traits hold, as plain data."""
    place = f"lsw-{secrets.token_hex(6)}"
    image = base64.b64encode(picture).decode("ascii")
    notes = "".join(f"<li>{escape(note)}</li>" for note in view.notes)
    notes = f"<ul>{notes}</ul>" if notes else ""
    # Nothing in a script's text may look like its end.
    data = json.dumps(state, allow_nan=False, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
    return (
        f'<div id="{place}"><p><strong>{escape(title)}</strong></p><p>{escape(view.says)}</p>'
        f'<img alt="{escape(title)}: the table below holds the same numbers" style="max-width:100%" '
        f'src="data:image/png;base64,{image}">{table_html(view.table)}{notes}</div>\n'
        f'<script type="module">\n{module_source(name)}\n'
        f'show(document.getElementById("{place}"), {data}, view);\n</script>'
    )


def table_html(table: Table) -> str:
    """The table as plain HTML."""
    head = "".join(_cell("th scope='col'", heading) for heading in table.headings)
    rows = "".join(f"<tr>{''.join(_cell('td', cell) for cell in row)}</tr>" for row in table.rows)
    caption = _cell("caption", table.caption)
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(tag: str, text: str) -> str:
    return f"<{tag} style='text-align:left'>{escape(text)}</{tag.split()[0]}>"


def table_text(table: Table) -> str:
    """The table as aligned text."""
    lines = [list(table.headings), *map(list, table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join([table.caption, *aligned])


def whole_page(title: str, body: str) -> str:
    """A page that opens in any browser."""
    return _PAGE.format(title=escape(title), body=body)
