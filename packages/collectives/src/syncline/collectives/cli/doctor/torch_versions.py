"""With which versions of torch our tests were run. A pure table; docs/reference/versions.md says what was run with each."""

from __future__ import annotations

#: Major and minor version. Others may work; nobody has looked.
RUN_WITH = ("2.6", "2.8", "2.10", "2.13", "2.14", "2.15")


def was_run(version: str) -> bool:
    """Whether tests were run with this version, such as "2.13.0+cpu", or another of the same major and minor number."""
    return ".".join(version.split(".")[:2]) in RUN_WITH
