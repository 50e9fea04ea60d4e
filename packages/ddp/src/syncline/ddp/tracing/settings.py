"""Read which steps to trace, and in which folder to store the trace."""

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
    """The steps to trace, and the folder for the trace. A step is a backward that averages gradients. The first step is step 1.

    Attributes:
        folder: the result of `fixed_folder`. The folder is created if it is missing.
        first: the first traced step, 1 or above.
        last: the last traced step; None: trace until the script ends the trace.
    """

    folder: Path
    first: int = 1
    last: int | None = None


def settings_from(environ: Mapping[str, str]) -> TraceSettings | None:
    """Return the settings in `SYNCLINE_TRACE` and `SYNCLINE_TRACE_STEPS`, or None if `SYNCLINE_TRACE` is not set."""
    folder = environ.get(FOLDER_VARIABLE, "")
    if not folder:
        return None
    first, last = parse_steps(environ.get(STEPS_VARIABLE) or DEFAULT_STEPS, STEPS_VARIABLE)
    return TraceSettings(fixed_folder(folder), first, last)


def fixed_folder(folder: str | Path) -> Path:
    """Return the folder for the files of all ranks. A relative path counts from the present working directory."""
    try:
        return Path(folder).absolute()  # the script may change its working directory before the trace is written
    # The working directory was removed. Let the rank warn when it cannot write its file.
    except OSError:
        return Path(folder)


def parse_steps(text: str, name: str) -> tuple[int, int]:
    """Return the first and the last step of a text such as "10-20". The text "7" names only step 7.

    Raises:
        InvalidArgumentError: the text has another form, or not 1 <= first <= last. The error's text contains `name`.
    """
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    first = int(match[1]) if match else 0
    last = int(match[2] or match[1]) if match else 0
    if not 1 <= first <= last:
        raise InvalidArgumentError(
            f"{name}: expected the first and the last step, counted from 1, such as 10-20; found {text!r}"
        )
    return first, last
