"""Check that the libraries for tables and plots, rich and Plotly, are installed."""

from __future__ import annotations

from importlib.util import find_spec

from syncline.collectives import MisuseError


def require_extra(library: str) -> None:
    """Check that a library is installed.

    Raises:
        MisuseError: the library is not installed. The text says what to install.
    """
    if find_spec(library) is None:
        raise MisuseError(f"a report of a trace needs {library}, which is not installed: pip install plotly rich")
