"""Templates to pages: one file with its styles, script and images, which needs no network. Free of torch."""

import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lockstep import __version__
from lockstep.config.words import number, percent, seconds

FOLDER = Path(__file__).parent / "templates"


def interval(ends: tuple[float, float]) -> str:
    return f"{100 * ends[0]:.1f}–{100 * ends[1]:.1f}"


FILTERS = (percent, interval, seconds, number)


def render(template: str, title: str, values: Mapping[str, Any], filters: Sequence[Callable[..., Any]] = ()) -> str:
    loader = FileSystemLoader(FOLDER)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {function.__name__: function for function in (*FILTERS, *filters)}
    made.tests["share"] = lambda value: hasattr(value, "interval")
    made.tests["setting"] = lambda value: hasattr(value, "text") and hasattr(value, "value")
    made.tests["integer"] = lambda value: isinstance(value, Integral) and not isinstance(value, bool)
    css, js = (Markup((FOLDER / name).read_text()) for name in ("page.css", "page.js"))
    own = {"title": title, "version": __version__, "written": time.strftime("%Y-%m-%d %H:%M %Z")}
    return made.get_template(template).render(**values, **own, css=css, js=js)
