"""Run by wheels.py with the Python of `.venv`: FOLDER REQUIREMENT...

Links into FOLDER everything that the requirements, and their own requirements, have installed for this Python, and nothing
else. On the path of another environment, the folder stands in for an installation, without the time and the space for a second
torch.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(names: list[str]) -> dict[str, Distribution]:
    """The distributions with these names, and everything they require here, without extras."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found[name] = distribution(name)
        required = [Requirement(text) for text in found[name].requires or ()]
        waiting += [one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def link(one: Distribution, folder: Path) -> None:
    """Link each file and folder at the top of site-packages that belongs to a distribution."""
    for top in {path.parts[0] for path in one.files or ()} - {"..", "__pycache__"}:
        place = folder / top
        if not place.is_symlink():  # a namespace may belong to several
            place.symlink_to(Path(str(one.locate_file(top))).resolve())


def main(folder: str, *requirements: str) -> None:
    Path(folder).mkdir()
    for one in closure([Requirement(text).name for text in requirements]).values():
        link(one, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
