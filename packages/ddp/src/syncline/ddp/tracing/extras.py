"""The libraries that reports need."""

from __future__ import annotations

from importlib.util import find_spec

from syncline.collectives import MisuseError


def require_extra(library: str) -> None:
    """Complain if it is not installed.

    Raises:
        MisuseError: it is not; names the extra.
    """
    if find_spec(library) is None:
        raise MisuseError(f"a report of a trace needs {library}, which is not installed: pip install 'syncline-ddp[report]'")
