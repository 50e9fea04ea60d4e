"""JobReport: the reports of all ranks of a job, merged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine.call import DONE, CallRecord
from ..errors import InvalidArgumentError
from .divergence import find_divergence
from .statements import ranks_in_words


@dataclass(frozen=True)
class GroupRecord:
    """What one rank remembers of one group.

    Attributes:
        name: of the group.
        ranks: for each rank of the group its rank in the job.
        calls: in the order of their issue.
    """

    name: str
    ranks: tuple[int, ...]
    calls: tuple[CallRecord, ...]


@dataclass(frozen=True)
class RankReport:
    """What one rank wrote.

    Attributes:
        rank: of the job.
        size: of the job.
        host: its name.
        pid: of the process.
        written_at: in seconds since the epoch.
        reason: why it was written.
        groups: of the rank.
        stacks: of its threads.
    """

    rank: int
    size: int
    host: str
    pid: int
    written_at: float
    reason: str
    groups: tuple[GroupRecord, ...]
    stacks: str

    @classmethod
    def parse(cls, text: str) -> RankReport:
        """From the text of a file.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        content = json.loads(text)
        groups = tuple(
            GroupRecord(group["name"], tuple(group["ranks"]), tuple(map(CallRecord.from_dict, group["calls"])))
            for group in content["groups"]
        )
        names = ("rank", "size", "host", "pid", "written_at", "reason", "stacks")
        return cls(groups=groups, **{name: content[name] for name in names})


def read_reports(folder: Path) -> list[RankReport]:
    """The latest report of each rank, by rank.

    Raises:
        InvalidArgumentError: the folder holds none, or one that cannot be read.
    """
    latest: dict[int, RankReport] = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            report = RankReport.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(f"{path} is no report of Syncline: {type(error).__name__}: {error}") from error
        if report.rank not in latest or latest[report.rank].written_at < report.written_at:
            latest[report.rank] = report
    if not latest:
        raise InvalidArgumentError(f"expected files rank-*.json in {folder}, found none; give the folder that the error named")
    return [latest[rank] for rank in sorted(latest)]


def merged(reports: Sequence[RankReport]) -> str:
    """For each group a table of its ranks and a sentence: what each was in, who is behind, where they part. A pure function."""
    missing = sorted(set(range(reports[0].size)) - {report.rank for report in reports})
    lines = [f"{len(reports)} of {reports[0].size} rank(s) have reported"]
    if missing:
        lines.append(
            f"{ranks_in_words(missing)} wrote nothing: not running any more, or not come so far as to notice a failure"
        )
    for name, ranks in _groups(reports):
        lines += ["", f"group '{name}' of {ranks_in_words(ranks)}", *_group_lines(name, ranks, reports)]
    return "\n".join(lines)


def _groups(reports: Sequence[RankReport]) -> Iterator[tuple[str, tuple[int, ...]]]:
    found = dict.fromkeys((group.name, group.ranks) for report in reports for group in report.groups)
    yield from found


def _group_lines(name: str, ranks: tuple[int, ...], reports: Sequence[RankReport]) -> list[str]:
    calls: dict[int, Sequence[CallRecord]] = {}
    rows = [("rank", "host", "pid", "calls begun", "last call", "state")]
    for report in reports:
        for group in report.groups:
            if (group.name, group.ranks) == (name, ranks):
                calls[report.rank] = group.calls
                last = current_call(group.calls)
                what = ("-", "-") if last is None else (str(last), last.state)
                rows.append((str(report.rank), report.host, str(report.pid), str(_begun(group.calls)), *what))
    return [*_columns(rows), sentence(calls)]


def sentence(calls: Mapping[int, Sequence[CallRecord]]) -> str:
    """What is wrong with a group, in one sentence. A pure function.

    Args:
        calls: for each rank that has reported what it remembers.
    """
    divergence = find_divergence(calls)
    if divergence is not None:
        return divergence.sentence
    waiting = {rank: current for rank, mine in calls.items() if (current := current_call(mine)) and current.state != DONE}
    if waiting:
        return f"all made the same calls; {ranks_in_words(sorted(waiting))} did not finish {next(iter(waiting.values()))}"
    return "all made the same calls, and finished them"


def current_call(calls: Sequence[CallRecord]) -> CallRecord | None:
    """The first call that has begun and not succeeded, else the last that has begun, else the last."""
    begun = [call for call in calls if call.state != "queued"]
    unfinished = [call for call in begun if call.state != DONE]
    if unfinished:
        return unfinished[0]
    return next(reversed(begun or calls), None)


def _begun(calls: Sequence[CallRecord]) -> int:
    return max((call.position + 1 for call in calls if call.position is not None), default=0)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
