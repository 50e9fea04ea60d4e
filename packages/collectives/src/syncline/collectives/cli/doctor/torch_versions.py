"""The versions of torch with which our tests were run. docs/reference/versions.md says which tests ran with which version."""

from __future__ import annotations

#: Major and minor versions. Other versions may work, but were not tested.
RUN_WITH = ("2.6", "2.8", "2.10", "2.13", "2.14", "2.15")


def was_run(version: str) -> bool:
    """Whether our tests were run with this major and minor version. `version` is a full version, such as "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2]) in RUN_WITH
