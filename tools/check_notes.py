"""Checks that every Note that is cited by name exists where the citation says: python3 tools/check_notes.py.

A Note is defined by a line `Note [Name]` that is underlined with `~` or `-`. It is cited as "Note [Name]", which must be
defined in the same file, or as "Note [Name] in `module`", which must be defined in a file whose dotted path ends so.
Exits 1, with one line per violation, if there is any.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_DEFINED = re.compile(r"^\s*(?:#\s*)?Note \[([^\]]+)\]\n\s*(?:#\s*)?[~-]{4,}", re.MULTILINE)
# A citation may be broken over two lines, with a comment sign or a docstring's indentation in between.
_CITED = re.compile(r"Notes?\s+(?:#\s*)?\[([^\]]+)\](?:\s+(?:#\s*)?in\s+(?:#\s*)?`([\w.]+)`)?")


def main() -> int:
    """Print the violations; returns the exit status."""
    found = list(violations({path: path.read_text() for path in sorted(ROOT.glob("packages/*/src/**/*.py"))}))
    print("\n".join(found) or "every Note is where it is cited")
    return 1 if found else 0


def violations(texts: Mapping[Path, str]) -> Iterator[str]:
    """One line for each citation of a missing Note. A pure function of paths and texts."""
    defined: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for match in _DEFINED.finditer(text):
            defined[match[1]].add(_dotted(path))
    for path, text in texts.items():
        for match in _CITED.finditer(text):
            name, module = " ".join(match[1].replace("#", "").split()), match[2]
            places = defined.get(name, set())
            is_here = _dotted(path) in places
            is_there = module is not None and any(place == module or place.endswith(f".{module}") for place in places)
            if not (is_there or (module is None and is_here)):
                line = text.count("\n", 0, match.start()) + 1
                where = "nowhere" if not places else f"in {', '.join(sorted(places))}"
                wanted = "here" if module is None else f"in {module}"
                yield f"{path}:{line}: Note [{name}] is cited as defined {wanted}; it is {where}"


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    start = parts.index("src") + 1 if "src" in parts else 0
    return ".".join(part for part in parts[start:] if part != "__init__")


if __name__ == "__main__":
    sys.exit(main())
