"""TraceSettings: which steps are traced, and where to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline.collectives import InvalidArgumentError

FOLDER_VARIABLE = "SYNCLINE_TRACE"
STEPS_VARIABLE = "SYNCLINE_TRACE_STEPS"
DEFAULT_STEPS = "10-20"


@dataclass(frozen=True)
class TraceSettings:
    """Which steps are traced, and where to.

    A step is a backward that is reduced, with its forward and what follows until the next one. The first is number 1.

    Attributes:
        folder: for the files of all ranks; made if it is missing.
        first: the first step that is traced, 1 or above.
        last: the last one; None: until the trace is ended.
    """

    folder: Path
    first: int = 1
    last: int | None = None


def settings_from(environ: Mapping[str, str]) -> TraceSettings | None:
    """What `SYNCLINE_TRACE` and `SYNCLINE_TRACE_STEPS` say; None if nothing shall be traced.

    Raises:
        InvalidArgumentError: the steps are not as in "10-20".
    """
    folder = environ.get(FOLDER_VARIABLE, "")
    if not folder:
        return None
    first, last = parse_steps(environ.get(STEPS_VARIABLE) or DEFAULT_STEPS, STEPS_VARIABLE)
    return TraceSettings(Path(folder), first, last)


def parse_steps(text: str, name: str) -> tuple[int, int]:
    """The first and the last step of "10-20"; "7" is one step.

    Raises:
        InvalidArgumentError: it is something else; names `name`.
    """
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    first = int(match[1]) if match else 0
    last = int(match[2] or match[1]) if match else 0
    if not 1 <= first <= last:
        raise InvalidArgumentError(
            f"{name}: expected the first and the last step, counted from 1, such as 10-20; found {text!r}"
        )
    return first, last
