"""Measure one case: a collective of one dtype and size, on several subjects (backends and baselines) that take turns.

1. Each subject runs the collective once on known data, and the ranks check the result. If the subject cannot run the collective
   on one rank, all ranks skip the subject.
2. Each subject runs the collective a few times more, to warm up and to estimate the time of one call.
3. In each round, every subject takes one sample. Every second round has the reverse order. For a sample, the collective runs
   once without timing, to fill the caches. Then all ranks meet in a barrier, and the collective runs several times. On a GPU,
   the clock stops when the GPU has finished.
4. The value of a sample is the average time of one call, on the slowest rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from ...api.object_exchange import exchange_objects
from ...errors import MisuseError, TransportError
from ...group import ProcessGroup
from ...reduce_op import ReduceOp
from .kinds import CPU, KINDS, Buffers
from .results import Measurement
from .subjects import Call, Subject

T = TypeVar("T")

SAMPLE_S = 100e-6
LEAST_ROUNDS = 5
MOST_ROUNDS = 500
_TRIALS = 3


@dataclass(frozen=True)
class Case:
    """A collective, a dtype and a size."""

    collective: str
    dtype: torch.dtype
    size_bytes: int

    def numel(self, world_size: int) -> int:
        """Return the number of elements of `Buffers.block`.

        The size is rounded down, so that all ranks have parts of the same size. Each part has at least one element.
        """
        parts = world_size if KINDS[self.collective].has_parts else 1
        return max(1, self.size_bytes // (self.dtype.itemsize * parts)) * parts

    def true_bytes(self, world_size: int) -> int:
        """Return the size of the block in bytes, after rounding as in `numel`; 0 for a barrier."""
        return 0 if self.collective == "barrier" else self.numel(world_size) * self.dtype.itemsize


def measure(
    case: Case, subjects: Sequence[Subject], control: ProcessGroup, budget_s: float = 0.3, device: torch.device = CPU
) -> list[Measurement]:
    """Measure a case on all subjects, for about `budget_s` seconds each. All ranks of the group `control` call this function.

    Raises:
        TransportError: a subject's result is wrong on some rank. Every rank raises this error.
    """
    common = Buffers(control.rank, control.size, case.numel(control.size), case.dtype, device=device)
    calls: dict[str, Call] = {}
    refusals: dict[str, str] = {}
    for subject in subjects:
        try:
            calls[subject.name] = _verified(case, subject, common, control)
        except _RefusedError as refused:
            refusals[subject.name] = str(refused)
    common.clear()  # a subject that refused after `fill` has left data in `common`
    samples = _sample_in_turn(list(calls.values()), control, budget_s, device)
    taken = dict(zip(calls, samples, strict=True))
    return [
        Measurement(
            case.collective,
            str(case.dtype).removeprefix("torch."),
            case.true_bytes(control.size),
            control.size,
            subject.name,
            tuple(taken.get(subject.name, ())),
            refusals.get(subject.name, ""),
        )
        for subject in subjects
    ]


def _verified(case: Case, subject: Subject, common: Buffers, control: ProcessGroup) -> Call:
    kind = KINDS[case.collective]
    buffers, call = _agreed(lambda: _prepared(case, subject, common), control)
    buffers.clear()
    kind.fill(buffers)
    _agreed(call, control)
    verdicts = exchange_objects(kind.is_right(buffers) or not subject.communicates, group=control)
    if not all(verdicts):
        wrong = [rank for rank, is_right in enumerate(verdicts) if not is_right]
        raise TransportError(f"{subject.name}: {case.collective} of {case.dtype} gave a wrong result on rank(s) {wrong}")
    buffers.clear()
    return call


def _prepared(case: Case, subject: Subject, common: Buffers) -> tuple[Buffers, Call]:
    least = KINDS[case.collective].least_ranks
    if common.size < least:
        raise NotImplementedError(f"needs {least} ranks")
    allocate = subject.allocate()
    buffers = common if allocate is None else common.like(allocate)
    return buffers, subject.prepare(case.collective, buffers)


class _RefusedError(Exception):
    """A backend or baseline cannot run the collective on at least one rank. All ranks raise this error."""


def _agreed(action: Callable[[], T], control: ProcessGroup) -> T:
    """Call `action` on each rank, and return this rank's result. If `action` fails on any rank, all raise `_RefusedError`."""
    refusal, result = "", None
    try:
        result = action()
    except (MisuseError, NotImplementedError, RuntimeError) as error:
        refusal = str(error) or type(error).__name__
    refusals = exchange_objects(refusal, group=control)
    if any(refusals):
        raise _RefusedError(refusal_of_all(refusals))
    return cast(T, result)


def refusal_of_all(refusals: Sequence[str]) -> str:
    """Join the error texts of the ranks into one text. A rank without an error has an empty text. A pure function."""
    if len(set(refusals)) == 1:
        return refusals[0]
    return "; ".join(f"rank {rank}: {refusal}" for rank, refusal in enumerate(refusals) if refusal)


def _sample_in_turn(calls: Sequence[Call], control: ProcessGroup, budget_s: float, device: torch.device) -> list[list[float]]:
    estimates = _slowest([_sample(call, _TRIALS, control, device) for call in calls], control)
    repeats = [repeats_of(estimate) for estimate in estimates]
    rounds = rounds_of([estimate * count for estimate, count in zip(estimates, repeats, strict=True)], budget_s)
    samples: list[list[float]] = [[] for _ in calls]
    for number in range(rounds):
        for index in range(len(calls)) if number % 2 == 0 else reversed(range(len(calls))):
            samples[index].append(_sample(calls[index], repeats[index], control, device))
    return [_slowest(taken, control) for taken in samples]


def repeats_of(estimate_s: float) -> int:
    """Return the number of calls in one sample, if a call takes `estimate_s` seconds. A pure function."""
    return min(1000, max(1, math.ceil(SAMPLE_S / estimate_s)))


def rounds_of(sample_s: Sequence[float], budget_s: float) -> int:
    """Return the number of samples of each subject. A pure function.

    Args:
        sample_s: for each subject, the time that one sample takes.
        budget_s: seconds for each subject on average, including the warm-up.
    """
    if not sample_s:
        return 0
    with_warm_up_s = 2 * sum(sample_s)
    return min(MOST_ROUNDS, max(LEAST_ROUNDS, int(budget_s * len(sample_s) / with_warm_up_s)))


def _sample(call: Call, repeats: int, control: ProcessGroup, device: torch.device) -> float:
    call()
    _finish(device)
    control.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _finish(device)
    return (time.perf_counter() - start) / repeats


def _finish(device: torch.device) -> None:
    # On the CPU, calls return when the work is done.
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(samples: Sequence[float], control: ProcessGroup) -> list[float]:
    tensor = torch.tensor(samples, dtype=torch.float64)
    control.all_reduce(tensor, ReduceOp.MAX)
    slowest: list[float] = tensor.tolist()
    return slowest
