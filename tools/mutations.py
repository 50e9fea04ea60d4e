"""Deliberate breaks: do the tests catch them? Each break is made in a copy of the sources, and its tests run there.

`mutations.toml` lists them. The copy comes first on the path of imports, so installed packages are not changed.
As a script, MUTATIONS NUMBER tries one break: status 0 if it was caught.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpi_runtimes
from commands import ROOT, Outcome, ToolError, capture
from environment import LAYERS, PYTHON, VENV
from side_by_side import Ended, Job, run_side_by_side
from test_support import rank_log

LIST = ROOT / "tools" / "mutations.toml"
KEYS = {"name", "file", "old", "new", "tests", "only", "ranks"}
# A break that makes a test hang is caught, too. The limit is shorter than in the whole suite.
TEST_TIMEOUT_S, JOB_TIMEOUT_S = 40, 150.0
COPIED = ("packages", "integration_tests", "tools", "pyproject.toml", "constraints.txt", "docs", "README.md")
CAUGHT, SURVIVED, INVALID = "caught", "SURVIVED", "INVALID"


@dataclass(frozen=True)
class Mutation:
    """One deliberate break: `name` says what it breaks, `tests` which tests must catch it. `ranks` 0 means without mpiexec."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""
    ranks: int = 0

    @property
    def layer(self) -> str:
        return self.file.split("/")[0]

    def apply(self, source: str) -> str:
        """The broken source. A pure function.

        Raises:
            ToolError: the text to replace does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ToolError(f"mutation {self.name!r}: expected its old text once in {self.file}, found it {count} times")
        return source.replace(self.old, self.new)


def load(text: str) -> list[Mutation]:
    """The breaks in the text of the list. A pure function.

    Raises:
        ToolError: an entry has an unknown key or lacks one, changes nothing, or has the name of another.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    entries: list[dict[str, Any]] = tomllib.loads(text)["mutation"]
    for entry in entries:
        name = entry.get("name", "without a name")
        if unknown := entry.keys() - KEYS:
            raise ToolError(f"mutation {name!r}: unknown keys {sorted(unknown)}; known are {sorted(KEYS)}")
        if missing := KEYS - {"only", "ranks"} - entry.keys():
            raise ToolError(f"mutation {name!r}: expected the keys {sorted(missing)}")
        if entry["old"] == entry["new"]:
            raise ToolError(f"mutation {name!r} changes nothing")
    if len({entry["name"] for entry in entries}) < len(entries):
        raise ToolError("two mutations have the same name")
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def run_all(expression: str, width: int, table: Path | None) -> int:
    """Try all whose name or file matches the regular `expression`, `width` at a time; returns how many were not caught."""
    mutations = load(LIST.read_text())
    chosen = [
        (number, mutation)
        for number, mutation in enumerate(mutations)
        if re.search(expression, f"{mutation.file} {mutation.name}")
    ]
    with tempfile.TemporaryDirectory(prefix="syncline-verdicts-") as folder:
        jobs = [
            Job(mutation.name, (PYTHON, __file__, str(number), str(Path(folder) / str(number))), {"OMP_NUM_THREADS": "1"})
            for number, mutation in chosen
        ]
        took = {one.name: one for one in run_side_by_side(jobs, width)}
        verdicts = {mutation.name: _read(Path(folder) / str(number)) for number, mutation in chosen}
    rows = [_row(mutation, verdicts[mutation.name], took[mutation.name]) for _, mutation in chosen]
    print("\n=== summary ===")
    print("\n".join(" ".join(row) for row in rows))
    survivors = [name for name, (verdict, _) in verdicts.items() if verdict != CAUGHT]
    print(f"{len(rows) - len(survivors)} of {len(rows)} caught")
    for name in survivors:
        print(f"{verdicts[name][0]}: {name}")
    if table is not None:
        table.write_text(markdown(rows))
    return len(survivors)


def markdown(rows: Sequence[tuple[str, str, str, str]]) -> str:
    """The rows as a table. A pure function."""
    head = ("layer", "break", "verdict", "the test that sees it first")
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * 4, *rows)) + "\n"


def verdict_of(outcome: Outcome) -> tuple[str, str]:
    """The verdict, and the first test that failed, or the reason for none. A pure function."""
    failed = re.search(r"^(?:FAILED|ERROR) (\S*?)([^/\s]+::[^\s\[]+)", outcome.output, re.MULTILINE)
    if failed is not None and outcome.status != 2:
        return CAUGHT, f"`{failed[2]}`"
    if outcome.timed_out or re.search(r"^\+* Timeout \+*$", outcome.output, re.MULTILINE):
        return CAUGHT, "a test hung"
    if outcome.status == 0:
        return SURVIVED, "all passed"
    if outcome.status == 5:
        return INVALID, "no test is selected"
    return (INVALID, "the tests could not be collected") if outcome.status == 2 else (CAUGHT, "the job ended with an error")


def try_one(number: int) -> tuple[str, str]:
    """Break a copy, and run the tests there; returns the verdict and its reason."""
    mutation = load(LIST.read_text())[number]
    with tempfile.TemporaryDirectory(prefix="syncline-mutation-") as folder:
        copy = Path(folder)
        _copy_sources(copy)
        broken = copy / "packages" / mutation.file
        try:
            broken.write_text(mutation.apply(broken.read_text()))
        except ToolError as error:
            return INVALID, str(error)
        outcome = _run_tests(mutation, copy)
    print(outcome.output)
    return verdict_of(outcome)


def _copy_sources(copy: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, copy / name)
    (copy / VENV.name).symlink_to(VENV)  # tests that start jobs look for MPIs there


def _run_tests(mutation: Mutation, copy: Path) -> Outcome:
    # No bytecode: the bytecode of the sound source would still count for a break of the same second and length.
    env = {
        "PYTHONPATH": os.pathsep.join(str(copy / "packages" / layer / "src") for layer in LAYERS),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    paths = [copy / _path_of(test) for test in mutation.tests]
    words = ["-m", "pytest", "-q", "-x", "--tb=short", f"--timeout={TEST_TIMEOUT_S}", "-p", "no:cacheprovider"]
    words += ["-k", mutation.only] if mutation.only else []
    if not mutation.ranks:
        return capture((PYTHON, *words, "-m", "not mpi", *paths), timeout_s=JOB_TIMEOUT_S, cwd=copy, env=env)
    runtime = mpi_runtimes.find("mpich")
    plugin = ("-m", "mpi", "-p", "syncline.collectives.testing.pytest_plugin")
    command: tuple[str | Path, ...]
    command = (*runtime.command(mutation.ranks), PYTHON, rank_log.__file__, copy / "said", *words, *plugin, *paths)
    (copy / "said").mkdir()
    outcome = capture(command, timeout_s=JOB_TIMEOUT_S, cwd=copy, env={**env, **runtime.env})
    said = "\n".join(rank_log.read(copy / "said").values())
    return Outcome(outcome.status, f"{said}\n{outcome.output}", outcome.timed_out)


def _path_of(test: str) -> str:
    return test if test.startswith(("integration_tests/", "tools/")) else f"packages/{test}"


def _read(path: Path) -> tuple[str, str]:
    if not path.exists():
        return INVALID, "the attempt failed: see above"
    verdict, reason = path.read_text().split("\n", 1)
    return verdict, reason


def _row(mutation: Mutation, verdict: tuple[str, str], ended: Ended) -> tuple[str, str, str, str]:
    return mutation.layer, mutation.name, verdict[0], f"{verdict[1]} ({ended.taken_s:.0f} s)"


if __name__ == "__main__":
    found = try_one(int(sys.argv[1]))
    Path(sys.argv[2]).write_text("\n".join(found))
    print(": ".join(found))
    sys.exit(found[0] != CAUGHT)
