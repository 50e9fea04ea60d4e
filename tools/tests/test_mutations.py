"""The runner of deliberate breaks; `dev.py mutations` tries the breaks themselves."""

from __future__ import annotations

import re

import pytest

import mutations
from commands import ROOT, Outcome, ToolError

ENTRY = '[[mutation]]\nname = "n"\nfile = "f"\nold = "a"\nnew = "b"\ntests = ["t"]\n'


def test_the_list_is_well_formed_and_large() -> None:
    found = mutations.load(mutations.LIST.read_text())
    assert len(found) >= 40
    assert {mutation.layer for mutation in found} == {"collectives", "reducer", "ddp", "hooks"}


def test_every_break_fits_the_source_and_has_its_tests_and_its_row() -> None:
    """Otherwise a row that no longer fits would be found only by trying all breaks, which takes an hour."""
    found = mutations.load(mutations.LIST.read_text())
    rows = re.findall(r"^\| \w+ \| (.+?) \| caught \|", (ROOT / "docs" / "breaks.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(mutation.name for mutation in found)
    for mutation in found:
        broken = mutation.apply((ROOT / "packages" / mutation.file).read_text())
        compile(broken, mutation.name, "exec")  # a file that is no Python would be "caught" by no test
        for test in mutation.tests:
            assert any((ROOT / folder / test).exists() for folder in ("packages", ".")), f"{mutation.name}: no {test}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY + 'more = "x"\n', "unknown keys"),
        (ENTRY.replace('tests = ["t"]\n', ""), r"expected the keys \['tests'\]"),
        (ENTRY.replace('"b"', '"a"'), "changes nothing"),
        (ENTRY + ENTRY, "the same name"),
    ],
)
def test_a_list_that_is_wrong_is_refused(text: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        mutations.load(text)


@pytest.mark.parametrize(("source", "count"), [("xbx", 0), ("aa", 2)])
def test_a_break_that_does_not_apply_is_an_error(source: str, count: int) -> None:
    (mutation,) = mutations.load(ENTRY)
    assert mutation.apply("xax") == "xbx"
    with pytest.raises(ToolError, match=f"found it {count} times"):
        mutation.apply(source)


@pytest.mark.parametrize(
    ("status", "output", "timed_out", "verdict", "reason"),
    [
        (0, "3 passed", False, mutations.SURVIVED, "all passed"),
        (1, "FAILED packages/a/tests/test_x.py::test_y[1-2] - assert", False, mutations.CAUGHT, "`test_x.py::test_y`"),
        (1, "ERROR packages/a/tests/test_x.py::test_y - fixture", False, mutations.CAUGHT, "`test_x.py::test_y`"),
        (1, "+++++ Timeout +++++", False, mutations.CAUGHT, "a test hung"),
        (124, "", True, mutations.CAUGHT, "a test hung"),
        (139, "", False, mutations.CAUGHT, "the job ended with an error"),
        (2, "ERROR packages/a/tests/test_x.py", False, mutations.INVALID, "the tests could not be collected"),
        (5, "no tests ran", False, mutations.INVALID, "no test is selected"),
    ],
)
def test_the_verdict_on_a_run(status: int, output: str, timed_out: bool, verdict: str, reason: str) -> None:
    assert mutations.verdict_of(Outcome(status, output, timed_out)) == (verdict, reason)


def test_a_table_has_a_row_for_each_break() -> None:
    table = mutations.markdown([("reducer", "a break", "caught", "`test_x.py::test_y` (2 s)")])
    assert table.splitlines()[2] == "| reducer | a break | caught | `test_x.py::test_y` (2 s) |"
