"""The result of one check of the doctor, and functions that show results as text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_QUOTED = re.compile(r"(`[^`]*`)")


class Status(Enum):
    """The severity of a finding. OK: no problem. WARN: a job may be slower than necessary. WRONG: a job may fail."""

    OK = "ok"
    WARN = "warn"
    WRONG = "WRONG"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the name of the check, in one or two words.
        status: the severity.
        found: describes the result.
        remedy: how to solve the problem. Empty if and only if the status is OK.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.status is Status.OK) == bool(self.remedy):
            raise ValueError(f"finding '{self.name}': expected a remedy if and only if something is not ok")


def worst(findings: Sequence[Finding]) -> Finding:
    """Return the first finding with the highest severity. `findings` must not be empty."""
    severity = list(Status).index
    return max(findings, key=lambda finding: severity(finding.status))


def ok(name: str, found: str) -> Finding:
    """Return a finding with the status OK."""
    return Finding(name, Status.OK, found)


def in_text(findings: Sequence[Finding], width: int = 100) -> str:
    """Return the findings as aligned text, each with its remedy, and a summary at the end."""
    name_width = max((len(finding.name) for finding in findings), default=0)
    indent = " " * (7 + name_width + 2)
    lines: list[str] = []
    for finding in findings:
        lines += _wrapped(finding.found, f"{finding.status.value:<7}{finding.name:<{name_width}}  ", indent, width)
        if finding.remedy:
            lines += _remedy(finding.remedy, indent, width)
    return "\n".join([*lines, "", summary(findings)])


def _remedy(remedy: str, indent: str, width: int) -> list[str]:
    lines: list[str] = []
    for part in _parts(remedy):
        first = f"{indent}   " if lines else f"{indent}-> "
        # Each command has its own unbroken line, so that users can copy it.
        lines += [f"{indent}     {part.strip('`')}"] if _is_command(part) else _wrapped(part, first, f"{indent}   ", width)
    return lines


def _parts(remedy: str) -> list[str]:
    parts = [""]
    for piece in _QUOTED.split(remedy):
        if _is_command(piece):
            parts += [piece, ""]
        else:
            parts[-1] += piece
    return [part.strip(" ;,") for part in parts if part.strip(" ;,")]


def _is_command(piece: str) -> bool:
    return _QUOTED.fullmatch(piece) is not None and " " in piece and not piece.startswith("`-")


def summary(findings: Sequence[Finding]) -> str:
    """Return a text with the numbers of wrong findings and of warnings."""
    wrong = sum(finding.status is Status.WRONG for finding in findings)
    warned = sum(finding.status is Status.WARN for finding in findings)
    if not wrong and not warned:
        return "everything is fine"
    return f"{wrong} wrong, {warned} to look at"


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if a finding is wrong, else 0."""
    return int(any(finding.status is Status.WRONG for finding in findings))


def _in_one_line(text: str) -> str:
    return ". ".join(line.removeprefix("- ").rstrip(".") for line in text.splitlines())


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    return textwrap.wrap(_in_one_line(text), width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False) or [
        first
    ]
