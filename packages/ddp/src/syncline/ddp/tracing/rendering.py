"""Make tables for the terminal with rich, and figures for pages with Plotly."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .extras import require_extra

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 110
_WIDEST = 1000
_HEIGHT = 420


def table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table whose columns are aligned at the right."""
    require_extra("rich")
    from rich.box import SIMPLE
    from rich.table import Table

    made = Table(title=title, box=SIMPLE, title_justify="left")
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def printed(*parts: str | Table) -> str:
    """Return texts and tables as one text for a terminal, one below the other."""
    require_extra("rich")
    from rich.console import Console
    from rich.measure import Measurement

    text = io.StringIO()
    console = Console(file=text, width=_WIDTH)
    # Cells are not wrapped, so make the lines as wide as the widest table.
    wide = console.options.update(width=_WIDEST)
    needed = [Measurement.get(console, wide, part).maximum for part in parts if not isinstance(part, str)]
    console = Console(file=text, width=max(_WIDTH, *needed, 0))
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False)
        else:
            console.print(part)
    return text.getvalue().rstrip()


def milliseconds(seconds: float) -> str:
    """Convert seconds to a text in milliseconds."""
    return f"{1e3 * seconds:.2f}"


def script() -> str:
    """Return Plotly's script as HTML. A page that contains this script needs no other file."""
    require_extra("plotly")
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def figure(div_id: str, data: Sequence[dict[str, Any]], title: str, x: dict[str, Any], y: dict[str, Any], **layout: Any) -> str:
    """Return one figure as HTML, for a page that contains the result of `script`.

    `data` are Plotly's traces. `x` and `y` are options of the axes, such as the title. `layout` are further options.
    """
    require_extra("plotly")
    import plotly.graph_objects as graphs

    made = graphs.Figure(data=list(data), layout={"title": title, "height": _HEIGHT, "xaxis": x, "yaxis": y, **layout})
    return str(made.to_html(full_html=False, include_plotlyjs=False, div_id=div_id))
