"""Merge the files of all ranks in a folder into the trace file `trace.json`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline.collectives import InvalidArgumentError

from .chrome_trace import chrome_trace
from .part import read_parts
from .profiler_trace import add_profiler_trace
from .timeline import Timeline, merge

TRACE_NAME = "trace.json"

logger = logging.getLogger("syncline.ddp")


def read_timeline(folder: Path) -> Timeline:
    """Read the timeline of the latest run in a folder.

    Raises:
        InvalidArgumentError: the folder has no file of a rank, or a file cannot be read.
    """
    return merge(read_parts(folder))


def write_trace(folder: Path, path: Path | None = None, profiles: Mapping[int, Path] | None = None) -> Path:
    """Merge the ranks' files in a folder into one file in the Chrome trace format, and return its path.

    Log a warning if the folder lacks the files of some ranks.

    Args:
        folder: the folder with the ranks' files.
        path: the file to write; None means `trace.json` in the folder.
        profiles: for some ranks, a file of `torch.profiler` with the same steps, to merge as well.

    Raises:
        InvalidArgumentError: a file cannot be read or written.
    """
    timeline = read_timeline(folder)
    trace = chrome_trace(timeline)
    for rank, profile in (profiles or {}).items():
        add_profiler_trace(trace, timeline, rank, _read_json(profile), profile)
    target = folder / TRACE_NAME if path is None else path
    try:
        target.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write the trace {target}: {error.strerror}") from error
    if timeline.missing:
        logger.warning(
            "the trace %s lacks rank(s) %s: copy the files of all ranks into one folder, and run syncline trace FOLDER",
            target,
            ", ".join(map(str, timeline.missing)),
        )
    return target


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"cannot read {path} as a trace of torch.profiler: {error}") from error
