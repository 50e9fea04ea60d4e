"""What torch's `_get_ddp_logging_data` tells, from our statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.collectives import ProcessGroup
from syncline.reducer import IterationStatistics, Reducer

LoggingData = dict[str, int | str]


def describe_module(module: torch.nn.Module, parameters: Sequence[torch.Tensor], group: ProcessGroup) -> LoggingData:
    """What does not change: module, ranks, sizes in bytes."""
    return {
        "module_name": type(module).__name__,
        "rank": group.rank,
        "world_size": group.size,
        "backend_name": group.backend_name,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "dtypes": ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
        "is_multi_device_module": int(len({parameter.device for parameter in parameters}) > 1),
        "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in module.modules())),
    }


def describe_buckets(reducer: Reducer) -> LoggingData:
    """How gradients are grouped now: bytes, and how many."""
    sizes = ", ".join(str(bucket.nbytes) for bucket in reducer.buckets)
    rebuilt = int(reducer.has_rebuilt_buckets)
    return {
        "rebuilt_bucket_sizes" if rebuilt else "bucket_sizes": sizes,
        "has_rebuilt_buckets": rebuilt,
        "num_buckets_reduced": len(reducer.statistics.buckets),
    }


def describe_algorithms(reducer: Reducer, group: ProcessGroup) -> LoggingData:
    """By which algorithm the group reduced each bucket last; nothing if the group does not say, or has reduced none."""
    found = [group.algorithm_of("all_reduce", bucket.buffer) for bucket in reducer.buckets]
    return {"bucket_algorithms": ", ".join(name or "unknown" for name in found)} if any(found) else {}


def describe_iteration(times: IterationStatistics) -> LoggingData:
    """The latest iteration, in nanoseconds of `time.perf_counter`, under torch's names; without those that are not known."""
    if not times.finished:
        return {}
    found: dict[str, float] = {
        "forward_compute_time_start": times.forward_started,
        "backward_compute_time_start": times.backward_started,
        "backward_compute_time_end": times.last_gradient,
        "backward_compute_time": times.last_gradient - times.backward_started,
    }
    if times.forward_ended:
        found["forward_compute_time"] = times.forward_ended - times.forward_started
    ends = [bucket.finished for bucket in times.buckets if bucket.finished is not None]
    if ends:
        start, end = times.buckets[0].started, max(ends)
        found["backward_comm_time_start"] = start
        found["backward_comm_time_end"] = end
        found["backward_comm_time"] = end - start
        found["backward_compute_comm_overlap_time"] = max(0.0, min(end, times.last_gradient) - start)
    return {name: round(seconds * 1e9) for name, seconds in found.items()}
