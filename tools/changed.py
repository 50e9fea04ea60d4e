"""Which tests belong to a change: the choice of `dev.py check`. It is a choice, not a proof: `dev.py test` runs all.

1. A changed test file runs. For a helper beside test files (such as a `*_job.py`), the test files run that contain its name. 2.
   For a module of a layer, test files of this layer run if their own name, an import, or their folder has the module's name. If
   there are none, the same search is made for the name of its package, then of the package around it. If nothing is found, all
   tests of the layer run. 3. For a module in `tools/`, the test files in `tools/tests` run that import it; for one in
   `tools/test_support`, all that do. 4. For a page, a README or a file in `docs/`, the documentation is built and
   `tools/tests/test_docs.py` runs. 5. For a file in `examples/`, `integration_tests/test_examples.py` runs, and the
   documentation is built, because a page shows it. 6. Files `*_mpi.py` of `integration_tests` run on two ranks under MPICH, the
   others as they are.

For other files (`pyproject.toml`, CI, data) nothing runs; their names are printed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from commands import ROOT, ToolError
from environment import LAYERS

TEST_OF_DOCS = PurePosixPath("tools/tests/test_docs.py")
TEST_OF_EXAMPLES = PurePosixPath("integration_tests/test_examples.py")


@dataclass
class Selection:
    """The choice: test files, as paths below the root, whether to build the site, and files without tests."""

    tests: set[PurePosixPath] = field(default_factory=set)
    docs: bool = False
    without: list[PurePosixPath] = field(default_factory=list)

    def below(self, folder: str) -> list[PurePosixPath]:
        """The chosen test files in a folder, in order."""
        return sorted(path for path in self.tests if path.is_relative_to(folder))

    @property
    def under_mpi(self) -> list[PurePosixPath]:
        """The files that run under mpiexec."""
        return [path for path in self.below("integration_tests") if path.stem.endswith("_mpi")]


def changed_files(since: str) -> list[PurePosixPath]:
    """New and changed files since this branch left `since`, committed or not; without deleted files."""
    base = _git("merge-base", since, "HEAD").strip()
    listed = _git("diff", "--name-only", "--diff-filter=d", base) + _git("ls-files", "--others", "--exclude-standard")
    return sorted({PurePosixPath(line) for line in listed.splitlines()})


def select(changed: Iterable[PurePosixPath], tests: dict[PurePosixPath, str]) -> Selection:
    """The tests that belong to the changed files. `tests` gives the text of each test file by its path. A pure function."""
    selection = Selection()
    for path in changed:
        if path in tests:
            selection.tests.add(path)
        elif path.suffix == ".md" or path.is_relative_to("docs") or path.name == "mkdocs.yml":
            selection.docs = True
            selection.tests |= {TEST_OF_DOCS} & tests.keys()
        elif path.parts[0] == "examples":
            selection.docs = True
            selection.tests |= {TEST_OF_EXAMPLES} & tests.keys()
        elif found := _tests_of(path, tests):
            selection.tests |= found
        else:
            selection.without.append(path)
    return selection


def test_files() -> dict[PurePosixPath, str]:
    """Every test file, and its text."""
    folders = [*(ROOT / "packages" / layer / "tests" for layer in LAYERS), ROOT / "integration_tests", ROOT / "tools" / "tests"]
    paths = [path for folder in folders for path in folder.rglob("test_*.py")]
    return {PurePosixPath(path.relative_to(ROOT).as_posix()): path.read_text() for path in paths}


def _tests_of(path: PurePosixPath, tests: dict[PurePosixPath, str]) -> set[PurePosixPath]:
    home = _home(path)
    if path.suffix != ".py" or home is None:
        return set()
    near = {test: text for test, text in tests.items() if test.is_relative_to(home)}
    if "src" not in path.parts and path.parts[0] != "tools":
        return {test for test, text in near.items() if path.stem in text or path.name == "conftest.py"}
    for name in _names(path):
        imports = re.compile(rf"^\s*(?:from|import)\b.*\b{re.escape(name)}\b", re.MULTILINE)
        found = {test for test, text in near.items() if name in test.stem or name == test.parent.name or imports.search(text)}
        if found:
            return found
    return set() if path.parts[0] == "tools" else set(near)


def _names(path: PurePosixPath) -> list[str]:
    """A module's name, then those of its packages, the innermost first; for a tool only its name."""
    folders = path.parts[5:-1] if path.parts[0] == "packages" else ()  # the first five: packages, LAYER, src, syncline, LAYER
    return [path.stem, *reversed(folders)] if path.stem != "__init__" else [*reversed(folders)]


def _home(path: PurePosixPath) -> str | None:
    """The folder with a file's own tests."""
    if path.is_relative_to("tools/test_support"):
        return "."
    if path.parts[0] == "packages" and path.parts[1] in LAYERS:
        return f"packages/{path.parts[1]}/tests"
    return {"tools": "tools/tests", "integration_tests": "integration_tests"}.get(path.parts[0])


def _git(*words: str) -> str:
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise ToolError(f"`git {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
