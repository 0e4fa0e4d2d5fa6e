"""One widget, three hosts: a live notebook, a page without a kernel, a picture. All from one `_repr_mimebundle_`."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import traitlets

from widgets.page import fragment, module_source, table_text, whole_page
from widgets.picture import png
from widgets.view import View
from workbench.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class Control:
    """One labelled input: a slider over a list of values, or a drop-down list ("choice").

    name: of the trait. texts: the values as shown, with their unit; default: the values themselves.
    applies: {"control": another's name, "values": those with which this one matters, "otherwise": what is shown in
        its place}; None: always.
    """

    name: str
    label: str
    values: tuple[Any, ...]
    texts: tuple[str, ...] = ()
    kind: str = "slider"
    applies: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.values or (self.texts and len(self.texts) != len(self.values)):
            raise InvalidInputError(f"control {self.name!r} needs values, and as many texts")

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"texts": list(self.texts or map(str, self.values)), "values": list(self.values)}


def checked(*names: str) -> traitlets.ValidateHandler:
    """A class attribute that lets these traits take their control's values only."""

    def check(self: Widget, proposal: Any) -> Any:
        return self.check_value(proposal["trait"].name, proposal["value"])

    return traitlets.validate(*names)(check)


def _plain_record(record: Any, _: Any = None) -> Any:
    return asdict(record) if is_dataclass(record) and not isinstance(record, type) else record


class Widget(anywidget.AnyWidget):
    """Base of all widgets: one frozen record in, typed traits for the controls, a view of both out.

    A subclass sets `title`, `script` (its JavaScript file), `record_type`, one trait per control and `controls` and
    `view_of`. A live notebook shows the anywidget, whose traits Python can observe; a published page runs the same
    JavaScript without a kernel; everywhere else there is a picture with a table.
    """

    title: ClassVar[str] = ""
    script: ClassVar[str] = ""
    record_type: ClassVar[type] = object

    record = traitlets.Any().tag(sync=True, to_json=_plain_record)
    _title = traitlets.Unicode().tag(sync=True)
    _controls = traitlets.List().tag(sync=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "script" in vars(cls):  # not for the class that anywidget derives once more for each instance
            cls._esm = module_source(cls.script)
        super().__init_subclass__(**kwargs)

    def __init__(self, record: Any, **values: Any) -> None:
        if not isinstance(record, self.record_type):
            raise InvalidInputError(
                f"{type(self).__name__}: record is {type(record).__name__}; give a {self.record_type.__name__}"
            )
        self._by_name = {control.name: control for control in self.controls(record)}
        if unknown := sorted(set(values) - set(self._by_name)):
            near = get_close_matches(unknown[0], self._by_name, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(self._by_name)}"
            raise InvalidInputError(f"{type(self).__name__} has no control {unknown[0]!r}: {hint}")
        super().__init__(
            record=record,
            _title=self.title,
            _controls=[control.plain() for control in self._by_name.values()],
            **(self.defaults(record) | values),
        )

    # --- what a subclass says -------------------------------------------------------------------------------------

    @classmethod
    def controls(cls, record: Any) -> tuple[Control, ...]:
        """The inputs for this record."""
        raise NotImplementedError

    @classmethod
    def defaults(cls, record: Any) -> dict[str, Any]:
        """Where the controls start: the class's own defaults where the record has them, else the first value."""
        found = {}
        for control in cls.controls(record):
            default = getattr(cls, control.name).default_value
            found[control.name] = default if default in control.values else control.values[0]
        return found

    @staticmethod
    def view_of(record: Any, state: Mapping[str, Any]) -> View:
        """What is shown for a record and the controls' values; the JavaScript file has its twin."""
        raise NotImplementedError

    # --- for everyone ---------------------------------------------------------------------------------------------

    def check_value(self, name: str, value: Any) -> Any:
        """`value`, if the control offers it. Raises InvalidInputError with what it offers."""
        values = self._by_name[name].values
        if value not in values:
            raise InvalidInputError(
                f"{type(self).__name__}.{name}={value!r} is not one of {', '.join(map(repr, values))}"
            )
        return value

    def state(self) -> dict[str, Any]:
        """The controls' values."""
        return {name: getattr(self, name) for name in self._by_name}

    def view(self) -> View:
        """What is shown now, as data."""
        return self.view_of(self.record, self.state())

    def html(self) -> str:
        """The widget as HTML for any page, interactive where scripts run; needs no kernel and no network."""
        return self._html(png(self.view()))

    def _html(self, picture: bytes) -> str:
        traits = {"record": _plain_record(self.record), "_title": self._title, "_controls": self._controls}
        state = traits | self.state()
        return fragment(name=self.script, title=self.title, view=self.view(), picture=picture, state=state)

    def save_html(self, path: str | Path) -> Path:
        """Writes one self-contained page with the widget as it stands; returns its path.

        Raises InvalidInputError if the folder does not exist.
        """
        target = Path(path)
        if not target.parent.is_dir():
            raise InvalidInputError(f"save_html: no folder {target.parent}")
        target.write_text(whole_page(self.title, self.html()), encoding="utf-8")
        return target

    def __repr__(self) -> str:
        view = self.view()
        return "\n".join([self.title, view.says, table_text(view.table), *(f"- {note}" for note in view.notes)])

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live widget, a page's HTML, a picture and text: the host shows the first that it can."""
        live = super()._repr_mimebundle_(**kwargs)
        data, metadata = live if isinstance(live, tuple) else (live or {}, {})
        picture = png(self.view())
        encoded = base64.b64encode(picture).decode("ascii")
        return {**data, "text/html": self._html(picture), "image/png": encoded, "text/plain": repr(self)}, metadata
