"""BucketTuning: finds the bucket sizes for `bucket_cap_mb="auto"`, by measuring some steps and predicting the others."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup, ReduceOp
from syncline.reducer import IterationStatistics, Reducer

from .prediction.forecast import CAPS_BYTES, FIRST_CAP_BYTES, MIB
from .prediction.replay import ReadyBucket, Workload, rebucket, replay, spread

_DEFAULT = (FIRST_CAP_BYTES, 25 * MIB)
_CANDIDATES = (
    _DEFAULT,
    *((min(FIRST_CAP_BYTES, cap), cap) for cap in CAPS_BYTES if cap != _DEFAULT[1]),
    *((cap, cap) for cap in CAPS_BYTES if cap > FIRST_CAP_BYTES),
)
_WORTH = 1.02
"""Other sizes than the default must promise so many times its speed."""

_SETTLING_STEPS, _MEASURED_STEPS, _TRIALS = 2, 6, 3
_MEASURED_BUCKETS = 32
_SMALLEST_BYTES, _FACTOR = 32 << 10, 4

logger = logging.getLogger("syncline.ddp")


@dataclass(frozen=True)
class ReductionCosts:
    """What all-reduces were measured to take.

    Attributes:
        nbytes: sizes, rising.
        seconds: of each; as many.
        issue_s: that the thread of backward needs to start one.
    """

    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]
    issue_s: float

    def reduce_s(self, nbytes: float) -> float:
        """Seconds of an all-reduce: a straight line between two sizes, and beyond the largest; the smallest takes the least."""
        if nbytes <= self.nbytes[0] or len(self.nbytes) == 1:
            return self.seconds[0] * max(1.0, nbytes / self.nbytes[0])
        upper = next((place for place, size in enumerate(self.nbytes) if size >= nbytes), len(self.nbytes) - 1)
        (x0, x1), (y0, y1) = self.nbytes[upper - 1 : upper + 1], self.seconds[upper - 1 : upper + 1]
        return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)


def measuring_caps(total_bytes: int) -> list[int]:
    """Sizes for the measured steps: small, so that they tell when gradients come. A pure function."""
    return [max(MIB, total_bytes // _MEASURED_BUCKETS)]


def predicted_steps(workload: Workload, costs: ReductionCosts) -> dict[tuple[int, int], float]:
    """For the size of the first bucket and of the others, the seconds of a step up to its last gradient. A pure function.

    Args:
        workload: with the buckets that were measured, whose starts cost time on the thread of backward.
        costs: of this group.
    """
    unhindered = _issuing(workload, -costs.issue_s)
    found = {}
    for caps in _CANDIDATES:
        hindered = _issuing(rebucket(unhindered, caps), costs.issue_s)
        found[caps] = replay(hindered, lambda bucket: costs.reduce_s(bucket.nbytes)).step_s
    return found


def choose(steps: dict[tuple[int, int], float]) -> tuple[int, int]:
    """The shortest step; the default where none is clearly shorter. A pure function."""
    best = min(steps, key=lambda caps: steps[caps])
    return best if steps[_DEFAULT] > _WORTH * steps[best] else _DEFAULT


def _issuing(workload: Workload, seconds: float) -> Workload:
    """Each bucket started so much later for itself and each one before; the last start is after the last gradient."""
    buckets, before = [], 0.0
    for bucket in workload.buckets:
        gradients = tuple(replace(one, came_s=one.came_s + before) for one in bucket.gradients)
        buckets.append(ReadyBucket(gradients, bucket.ready_s + before))
        before += seconds
    return Workload(tuple(buckets), workload.backward_s + before, workload.rest_s)


class BucketTuning:
    """Measures the first steps of a model, and chooses once. All ranks do so at the same step, and all choose the same.

    ::

        step 1               the reducer learns the order of the gradients, and builds the buckets in it
        steps 2 and 3        settle
        steps 4 to 9         measured: when each bucket could start, on the rank on which it came last
        after step 9         all-reduces of several sizes are measured, up to that of all gradients; rank 0 predicts the step
                             for each size, and broadcasts the best; the next forward builds the buckets anew

    Args:
        group: whose ranks average.
        reducer: whose buckets are measured; built with `measuring_caps`.

    Attributes:
        caps_bytes: the sizes of the first bucket and of the others; None until they are chosen.

    Cost: the all-reduces move about four times the bytes of a step.
    """

    def __init__(self, group: ProcessGroup, reducer: Reducer) -> None:
        self._group = group
        self._reducer = reducer
        self._steps: list[list[float]] = []
        self._settling = _SETTLING_STEPS
        self._is_over = False
        self.caps_bytes: list[int] | None = None

    def note_step(self, seen: IterationStatistics) -> None:
        """A backward was reduced. Of the last step that is measured it is a collective."""
        if self._is_over or not self._reducer.has_rebuilt_buckets:
            return
        if self._reducer.hook[0] is not None:
            self.give_up("a communication hook reduces the gradients")
        elif self._settling:
            self._settling -= 1
        else:
            self._steps.append(_times(seen))
            if len(self._steps) == _MEASURED_STEPS:
                self._decide()

    def give_up(self, why: str) -> None:
        """Measure no more; the buckets stay as they are. Called on all ranks after the same step."""
        if not self._is_over and self._group.rank == 0:
            logger.info('bucket_cap_mb="auto": the buckets stay as they are, because %s', why)
        self._is_over = True

    def _decide(self) -> None:
        if len({len(step) for step in self._steps}) > 1:  # on all ranks alike, for they reduce the same buckets
            self.give_up("not all of them were reduced in each step")
            return
        self._is_over = True
        times = torch.tensor(self._steps, dtype=torch.float64).median(dim=0).values
        self._group.all_reduce(times, ReduceOp.MAX)
        costs = self._measure_costs()
        chosen = torch.zeros(2, dtype=torch.int64)
        if self._group.rank == 0:
            steps = predicted_steps(self._workload(times.tolist()), costs)
            chosen = torch.tensor(choose(steps), dtype=torch.int64)
            self._say(steps, costs, tuple(chosen.tolist()))
        self._group.broadcast(chosen, 0)
        self.caps_bytes = chosen.tolist()
        self._reducer.change_bucket_caps(self.caps_bytes)

    def _workload(self, times: Sequence[float]) -> Workload:
        """Of the rank that came last with each bucket."""
        *starts, backward_s, began = times
        found = []
        for bucket, until in zip(self._reducer.buckets, starts, strict=True):
            shapes = [tuple(parameter.shape) for parameter in bucket.parameters]
            nbytes = [float(parameter.nbytes) for parameter in bucket.parameters]
            found.append(ReadyBucket(spread(shapes, nbytes, began, until), until))
            began = until
        return Workload(tuple(found), backward_s, 0.0)

    def _measure_costs(self) -> ReductionCosts:
        """A collective, of the same calls on all ranks."""
        total = sum(bucket.nbytes for bucket in self._reducer.buckets)
        sizes = [_SMALLEST_BYTES]
        while sizes[-1] < total:
            sizes.append(min(total, sizes[-1] * _FACTOR))
        dtype = self._reducer.buckets[0].parameters[0].dtype
        seconds, issue = [], []
        tensor = self._group.allocate(max(1, sizes[-1] // dtype.itemsize), dtype, torch.device("cpu")).zero_()
        for size in sizes:
            part = tensor[: max(1, size // dtype.itemsize)]
            self._group.all_reduce(part, ReduceOp.AVG)
            taken = [self._timed(part) for _ in range(_TRIALS)]
            issue += [issued for issued, _ in taken]
            seconds.append(statistics.median(finished for _, finished in taken))
        return ReductionCosts(tuple(map(float, sizes)), tuple(seconds), statistics.median(issue))

    def _timed(self, tensor: torch.Tensor) -> tuple[float, float]:
        """Seconds until an all-reduce is issued, and until it is over."""
        self._group.barrier()
        began = time.perf_counter()
        work = self._group.all_reduce(tensor, ReduceOp.AVG, async_op=True)
        issued = time.perf_counter()
        work.wait()
        return issued - began, time.perf_counter() - began

    def _say(self, steps: dict[tuple[int, int], float], costs: ReductionCosts, chosen: tuple[int, ...]) -> None:
        first, others = (size / MIB for size in chosen)
        best = min(steps.values())
        logger.info(
            'bucket_cap_mb="auto": buckets of %g MiB, the first of %g MiB: predicted %.2f ms until the gradients are there, '
            "%.2f with the default, %.2f at best; an all-reduce of %.3g MiB takes %.2f ms here. To keep it: "
            "bucket_cap_mb_list=[%g, %g]",
            others,
            first,
            1e3 * steps[(chosen[0], chosen[1])],
            1e3 * steps[_DEFAULT],
            1e3 * best,
            costs.nbytes[-1] / MIB,
            1e3 * costs.seconds[-1],
            first,
            others,
        )


def _times(seen: IterationStatistics) -> list[float]:
    """Seconds from the forward's start: of each bucket's start, of the last gradient, and of the first."""
    began = seen.forward_started
    starts = [bucket.started - began for bucket in seen.buckets]
    return [*starts, seen.last_gradient - began, seen.backward_started - began]


def check_can_tune(device: torch.device, dynamic: bool, sparse: bool) -> None:
    """Refuse to measure what cannot be.

    Raises:
        InvalidArgumentError: the model is on a device whose times the host does not see; parameters may be left out, so that
            the order of gradients is never learnt; or gradients are sparse, whose sizes change.
    """
    reasons = {
        f"the model is on {device}, whose work the host's clock does not see": device.type != "cpu",
        "find_unused_parameters=True keeps the buckets in their first order": dynamic,
        "sparse gradients have other sizes in each step": sparse,
    }
    for reason, holds in reasons.items():
        if holds:
            raise InvalidArgumentError(f'bucket_cap_mb="auto": {reason}; pass a number of MiB, such as bucket_cap_mb=25')
