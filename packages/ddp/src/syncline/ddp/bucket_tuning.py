"""Choose bucket sizes for `bucket_cap_mb="auto"`: measure some steps, and predict steps with other sizes."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup, ReduceOp, all_gather_object, placement_of
from syncline.reducer import IterationStatistics, Reducer

from .prediction.forecast import CAPS_BYTES, MIB
from .prediction.replay import ReadyBucket, Workload, rebucket, replay, spread

_DEFAULT = (MIB, 25 * MIB)
_CANDIDATES = (
    _DEFAULT,
    *((min(MIB, cap), cap) for cap in CAPS_BYTES if cap != _DEFAULT[1]),
    *((cap, cap) for cap in CAPS_BYTES if cap > MIB),
)
_WORTH = 1.05
"""Other sizes must make a step faster by this factor. Predictions of smaller gains are too inexact."""

_SETTLING_STEPS, _MEASURED_STEPS, _TRIALS = 2, 6, 3
_MEASURED_BUCKETS = 32
_SMALLEST_BYTES, _FACTOR = 32 << 10, 4

logger = logging.getLogger("syncline.ddp")


@dataclass(frozen=True)
class ReductionCosts:
    """Measured times of all-reduces.

    Attributes:
        nbytes: the measured sizes in bytes, in ascending order.
        seconds: the seconds of an all-reduce of each size.
        issue_s: the seconds that the thread of backward needs to start an all-reduce.
        taken: for each size, the seconds by which an all-reduce delays the computation that runs at the same time. Empty: no
            delay.
    """

    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]
    issue_s: float
    taken: tuple[float, ...] = ()

    def reduce_s(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of this size, by linear interpolation.

        Above the measured sizes, extrapolate linearly. Below the measured sizes, return the time of the smallest size.
        """
        return self._between(self.seconds, nbytes)

    def delay_s(self, nbytes: float) -> float:
        """Return the seconds by which an all-reduce of this size delays later gradients."""
        return self.issue_s + (self._between(self.taken, nbytes) if self.taken else 0.0)

    def _between(self, seconds: tuple[float, ...], nbytes: float) -> float:
        # With a single size, larger tensors are assumed to take proportionally longer.
        if nbytes <= self.nbytes[0] or len(self.nbytes) == 1:
            return seconds[0] * max(1.0, nbytes / self.nbytes[0])
        upper = next((place for place, size in enumerate(self.nbytes) if size >= nbytes), len(self.nbytes) - 1)
        (x0, x1), (y0, y1) = self.nbytes[upper - 1 : upper + 1], seconds[upper - 1 : upper + 1]
        return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)


def without_outliers(seconds: Sequence[float]) -> tuple[float, ...]:
    """Replace the time of each size by the shortest time of this size and of all larger sizes. Sizes are in ascending order.

    An all-reduce cannot take longer than an all-reduce of more bytes. Other load on the machine only makes times longer.
    """
    return tuple(min(seconds[place:]) for place in range(len(seconds)))


def share_of_cores(rank: int, busy_cores: Sequence[float], cores: Sequence[frozenset[int]]) -> float:
    """Return the part of an all-reduce's processor time, from 0 to 1, that delays the model's computation.

    Consider this rank and all ranks that share a core with this rank. The part is the number of cores that these ranks keep
    busy, divided by the number of cores on which they may run.

    Args:
        rank: this rank's position in the two lists.
        busy_cores: for each rank of this node, the average number of cores that the rank keeps busy while it trains.
        cores: for each rank of this node, the cores on which the rank may run.
    """
    sharing = [other for other, theirs in enumerate(cores) if theirs & cores[rank]]
    there = frozenset[int]().union(*(cores[other] for other in sharing))
    return min(1.0, sum(busy_cores[other] for other in sharing) / len(there))


def measuring_caps(total_bytes: int) -> list[int]:
    """Return the bucket sizes in bytes for the measured steps. Small buckets show more exactly when gradients come."""
    return [max(MIB, total_bytes // _MEASURED_BUCKETS)]


def predicted_steps(workload: Workload, costs: ReductionCosts) -> dict[tuple[int, int], float]:
    """Predict the seconds of a step for each candidate: a pair of sizes in bytes (first bucket, other buckets).

    The times of the measured workload include the delays of gradients by all-reduces.
    """
    unhindered = _delayed(workload, [-costs.delay_s(bucket.nbytes) for bucket in workload.buckets[:-1]] + [-costs.issue_s])
    found = {}
    for caps in _CANDIDATES:
        changed = rebucket(unhindered, caps)
        delays_s = [costs.delay_s(bucket.nbytes) for bucket in changed.buckets[:-1]] + [costs.issue_s]
        found[caps] = replay(_delayed(changed, delays_s), lambda bucket: costs.reduce_s(bucket.nbytes)).step_s
    return found


def choose(steps: dict[tuple[int, int], float]) -> tuple[int, int]:
    """Return the sizes with the shortest step, or the default sizes if their step is hardly longer."""
    best = min(steps, key=lambda caps: steps[caps])
    return best if steps[_DEFAULT] > _WORTH * steps[best] else _DEFAULT


def _delayed(workload: Workload, delays_s: Sequence[float]) -> Workload:
    """Shift all events after a bucket's start by the bucket's delay. A negative delay removes a measured delay."""
    buckets, ready_s, was_ready_s, delay_s = [], 0.0, 0.0, 0.0
    for bucket, own_delay_s in zip(workload.buckets, delays_s, strict=True):
        gradients = tuple(
            replace(one, came_s=ready_s + max(0.0, one.came_s - was_ready_s + delay_s)) for one in bucket.gradients
        )
        ready_s += max(0.0, bucket.ready_s - was_ready_s + delay_s)
        buckets.append(ReadyBucket(gradients, ready_s))
        was_ready_s, delay_s = bucket.ready_s, own_delay_s
    backward_s = ready_s + max(0.0, workload.backward_s - was_ready_s + delay_s)
    return Workload(tuple(buckets), backward_s, workload.rest_s)


class BucketTuning:
    """Measures the first steps of a model, and then chooses bucket sizes once, the same on all ranks.

    ::

        step 1               the reducer learns the order of the gradients, and builds the buckets in this order
        steps 2 and 3        are not measured, because the times still change
        steps 4 to 9         each rank measures when each bucket can start; for each bucket, the latest rank's time counts
        after step 9         the ranks measure all-reduces, up to the size of all gradients together; rank 0 predicts
                             a step for each pair of bucket sizes, and broadcasts the best pair; the next forward builds the
                             buckets anew

    An all-reduce may use cores that the model needs, and so delay the gradients that come at the same time. The delay is the
    processor time of the all-reduce, multiplied by `share_of_cores`.

    Args:
        reducer: the reducer whose buckets are measured, with the bucket sizes of `measuring_caps`.

    Attributes:
        caps_bytes: the size of the first bucket and the size of the other buckets, in bytes. None until the sizes are chosen.

    Cost: the measured all-reduces together reduce five to ten times the bytes of all gradients.
    """

    def __init__(self, group: ProcessGroup, reducer: Reducer) -> None:
        self._group = group
        self._reducer = reducer
        self._steps: list[list[float]] = []
        self._began: tuple[float, float] | None = None
        self._settling = _SETTLING_STEPS
        self._is_over = False
        self.caps_bytes: list[int] | None = None

    def note_step(self, seen: IterationStatistics) -> None:
        """Record the times of a step after its backward. The call for step 9 is a collective."""
        # Before the rebuild the buckets have another order, so their times mean nothing.
        if self._is_over or not self._reducer.has_rebuilt_buckets:
            return
        # `_measure_costs` measures all-reduces, so it cannot predict the times of a hook.
        if self._reducer.hook[0] is not None:
            self.give_up("a communication hook reduces the gradients")
        elif self._settling:
            self._settling -= 1
            self._began = _clocks()
        else:
            self._steps.append(_times(seen))
            if len(self._steps) == _MEASURED_STEPS:
                self._decide()

    def give_up(self, why: str) -> None:
        """Stop the tuning, and leave the buckets unchanged. All ranks call this method after the same step."""
        if not self._is_over and self._group.rank == 0:
            logger.info('bucket_cap_mb="auto": the buckets stay as they are, because %s', why)
        self._is_over = True

    def _decide(self) -> None:
        if len({len(step) for step in self._steps}) > 1:  # all ranks agree, because they reduce the same buckets
            self.give_up("not all of them were reduced in each step")
            return
        self._is_over = True
        share = self._share_of_cores()
        times = torch.tensor(self._steps, dtype=torch.float64, device="cpu").median(dim=0).values
        # A bucket can be reduced only when the last rank has it, so take the latest time of each bucket.
        self._group.all_reduce(times, ReduceOp.MAX)
        costs = self._measure_costs(share)
        chosen = torch.zeros(2, dtype=torch.int64, device="cpu")
        if self._group.rank == 0:
            steps = predicted_steps(self._workload(times.tolist()), costs)
            chosen = torch.tensor(choose(steps), dtype=torch.int64, device="cpu")
            self._say(steps, costs, tuple(chosen.tolist()))
        self._group.broadcast(chosen, 0)
        self.caps_bytes = chosen.tolist()
        self._reducer.change_bucket_caps(self.caps_bytes)

    def _workload(self, times: Sequence[float]) -> Workload:
        *starts, backward_s, began = times
        found = []
        for bucket, until in zip(self._reducer.buckets, starts, strict=True):
            shapes = [tuple(parameter.shape) for parameter in bucket.parameters]
            nbytes = [float(parameter.nbytes) for parameter in bucket.parameters]
            found.append(ReadyBucket(spread(shapes, nbytes, began, until), until))
            began = until
        return Workload(tuple(found), backward_s, 0.0)

    def _share_of_cores(self) -> float:
        """A collective. Return the largest `share_of_cores` of all ranks."""
        busy_s, passed_s = (now - began for now, began in zip(_clocks(), self._began or (0.0, 0.0), strict=True))
        said: list[tuple[float, frozenset[int]]] = [(0.0, frozenset())] * self._group.size
        all_gather_object(said, (busy_s / passed_s, _cores()), self._group)
        placement = placement_of(self._group)
        here = placement.ranks_on_node(placement.node)
        busy_cores, cores = zip(*(said[rank] for rank in here), strict=True)
        # Take the largest share, because all ranks wait for the rank that is slowed most.
        mine = share_of_cores(here.index(self._group.rank), busy_cores, cores)
        share = torch.tensor(mine, dtype=torch.float64, device="cpu")
        self._group.all_reduce(share, ReduceOp.MAX)
        return float(share)

    def _measure_costs(self, share: float) -> ReductionCosts:
        """A collective. Measure all-reduces of several sizes."""
        total = sum(bucket.nbytes for bucket in self._reducer.buckets)
        sizes = [_SMALLEST_BYTES]
        while sizes[-1] < total:
            sizes.append(min(total, sizes[-1] * _FACTOR))
        dtype = self._reducer.buckets[0].parameters[0].dtype
        seconds, issue, taken = [], [], []
        tensor = self._group.allocate(max(1, sizes[-1] // dtype.itemsize), dtype, torch.device("cpu")).zero_()
        for size in sizes:
            part = tensor[: max(1, size // dtype.itemsize)]
            # Do not measure the first call of a size: it also makes the plan that later calls use, so it takes longer.
            self._group.all_reduce(part, ReduceOp.AVG)
            trials = [self._timed(part) for _ in range(_TRIALS)]
            issue += [issued for issued, _, _ in trials]
            seconds.append(statistics.median(finished for _, finished, _ in trials))
            taken.append(share * statistics.median(busy for _, _, busy in trials))
        return ReductionCosts(
            tuple(map(float, sizes)), without_outliers(seconds), statistics.median(issue), without_outliers(taken)
        )

    def _timed(self, tensor: torch.Tensor) -> tuple[float, float, float]:
        """Return seconds until an all-reduce is issued, seconds until it is over, and the processor time of all threads."""
        # All ranks begin together, so no rank measures its wait for a late rank.
        self._group.barrier()
        busy, began = _clocks()
        work = self._group.all_reduce(tensor, ReduceOp.AVG, async_op=True)
        issued = time.perf_counter()
        work.wait()
        ended_busy, ended = _clocks()
        return issued - began, ended - began, ended_busy - busy

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


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def _times(seen: IterationStatistics) -> list[float]:
    began = seen.forward_started
    starts = [bucket.started - began for bucket in seen.buckets]
    return [*starts, seen.last_gradient - began, seen.backward_started - began]


def check_can_tune(device: torch.device, dynamic: bool, sparse: bool) -> None:
    """Check that `bucket_cap_mb="auto"` can measure the steps of the model.

    Raises:
        InvalidArgumentError: the model is not on the CPU. Or `dynamic` is True (each backward may use other parameters). Or
            `sparse` is True (some gradients are sparse).
    """
    reasons = {
        f"the model is on {device}, whose work the host's clock does not see": device.type != "cpu",
        "find_unused_parameters=True keeps the buckets in their first order": dynamic,
        "sparse gradients have other sizes in each step": sparse,
    }
    for reason, holds in reasons.items():
        if holds:
            raise InvalidArgumentError(f'bucket_cap_mb="auto": {reason}; pass a number of MiB, such as bucket_cap_mb=25')
