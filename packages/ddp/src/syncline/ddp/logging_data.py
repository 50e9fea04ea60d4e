"""Compute the logging data of torch's DDP from the reducer's statistics."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup
from syncline.reducer import IterationStatistics, Reducer

from .process_groups import AnyGroup
from .sync_batch_norm import SyncBatchNorm
from .torch_internals import gloo_threads

LoggingData = dict[str, int | str]

# torch's data use the names of C++ types.
_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ENVIRONMENT = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_DISTRIBUTED_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT",
)

_ALWAYS_SAMPLED = 10
_DEFAULT_SAMPLE_RATE = 100


class RuntimeSamples:
    """The mean times of sampled iterations: as in torch, the first ten, and then one in `sample_rate`."""

    def __init__(self) -> None:
        self.sample_rate = _DEFAULT_SAMPLE_RATE
        self._forwards = 0  # forwards whose backward was reduced, or will be
        self._iteration: int | None = None
        self._samples: list[tuple[float, float, float, float]] = []

    def forward_begins(self, before: IterationStatistics) -> None:
        """Count a forward. If the previous iteration is sampled, record its times from `before`."""
        iteration = self._forwards
        self._forwards += 1
        if iteration > 0 and (iteration <= _ALWAYS_SAMPLED or iteration % self.sample_rate == 0):
            self._iteration = iteration
            if before.finished:
                self._samples.append(_durations(before))

    def describe(self) -> LoggingData:
        """Return the number of the latest sampled iteration (0: none), and the mean times of sampled iterations in ns."""
        if self._iteration is None:
            return {"iteration": 0}
        names = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")
        means = [sum(column) / len(column) for column in zip(*self._samples, strict=True)]
        return {
            "iteration": self._iteration,
            **{f"avg_{name}_time": round(mean * 1e9) for name, mean in zip(names, means, strict=False)},
        }


def describe_error(reducer: Reducer) -> LoggingData:
    """Return the latest error, and the flag `has_error`. Empty if there was no error."""
    return {} if reducer.latest_error is None else {"has_error": 1, "error": reducer.latest_error}


def describe_hook(hook: Callable[..., Any] | None, builtin: dist.BuiltinCommHookType | None) -> LoggingData:
    """Return the name of the communication hook. Empty if there is no hook."""
    if builtin is not None:
        return {"comm_hook": str(builtin)}
    return {} if hook is None else {"comm_hook": name_of_hook(hook)}


def name_of_hook(hook: Callable[..., Any]) -> str:
    """Return the qualified name of a communication hook, or of its class if the hook is not a function."""
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def describe_environment() -> LoggingData:
    """Return the environment variables that torch reads. A variable that is not set has the value "N/A"."""
    return {name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT}


def describe_module(
    module: torch.nn.Module, parameters: Sequence[torch.Tensor], group: ProcessGroup, given: AnyGroup
) -> LoggingData:
    """Return the values that do not change during training: module, ranks, sizes in bytes.

    `given` is the group that the script passed: `group` itself, or the group of torch that `group` wraps.
    """
    threads = gloo_threads(given)
    return {
        **({} if threads is None else {"gloo_num_threads": threads}),
        "module_name": type(module).__name__,
        "rank": group.rank,
        "world_size": group.size,
        "backend_name": dist.get_backend(given) if isinstance(given, dist.ProcessGroup) else group.backend_name,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "dtypes": ", ".join(sorted({_name_of_dtype(parameter.dtype) for parameter in parameters})),
        "is_multi_device_module": int(len({parameter.device for parameter in parameters}) > 1),
        "has_sync_bn": int(any(isinstance(m, (SyncBatchNorm, torch.nn.SyncBatchNorm)) for m in module.modules())),
    }


def _name_of_dtype(dtype: torch.dtype) -> str:
    return _CPP_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def describe_buckets(reducer: Reducer) -> LoggingData:
    """Return sizes of buckets, unused parameters, and the order of gradients."""
    now = ", ".join(str(bucket.nbytes) for bucket in reducer.buckets)
    data: LoggingData = {
        "bucket_sizes": ", ".join(map(str, reducer.first_bucket_sizes)),
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        "num_buckets_reduced": len(reducer.statistics.buckets),
        "unused_parameter_size": sum(reducer.parameters[index].nbytes for index in reducer.absent),
        "can_set_static_graph": int(reducer.seems_static),
    }
    if reducer.has_rebuilt_buckets:
        data["rebuilt_bucket_sizes"] = now
        data["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, bucket.indices)) for bucket in reducer.buckets)
    if reducer.arrival_order is not None:
        data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, reducer.arrival_order))
    return data


def describe_algorithms(reducer: Reducer, group: ProcessGroup) -> LoggingData:
    """Return for each bucket the algorithm of its latest all_reduce. Empty if no algorithm is known."""
    found = [group.algorithm_of("all_reduce", bucket.buffer) for bucket in reducer.buckets]
    return {"bucket_algorithms": ", ".join(name or "unknown" for name in found)} if any(found) else {}


def describe_iteration(times: IterationStatistics) -> LoggingData:
    """Return the known times of the latest iteration in nanoseconds, with torch's names. The clock is `time.perf_counter`."""
    if not times.finished:
        return {}
    forward, backward, comm, overlap = _durations(times)
    found: dict[str, float] = {
        "forward_compute_time_start": times.forward_started,
        "backward_compute_time_start": times.backward_started,
        "backward_compute_time_end": times.last_gradient,
        "backward_compute_time": backward,
    }
    if times.forward_ended:
        found["forward_compute_time"] = forward
    span = _communication(times)
    if span is not None:
        found["backward_comm_time_start"], found["backward_comm_time_end"] = span
        found["backward_comm_time"] = comm
        found["backward_compute_comm_overlap_time"] = overlap
    return {name: round(seconds * 1e9) for name, seconds in found.items()}


def _durations(times: IterationStatistics) -> tuple[float, float, float, float]:
    forward = times.forward_ended - times.forward_started if times.forward_ended else 0.0
    backward = times.last_gradient - times.backward_started
    span = _communication(times)
    if span is None:
        return forward, backward, 0.0, 0.0
    start, end = span
    return forward, backward, end - start, max(0.0, min(end, times.last_gradient) - start)


def _communication(times: IterationStatistics) -> tuple[float, float] | None:
    ends = [bucket.finished for bucket in times.buckets if bucket.finished is not None]
    return (times.buckets[0].started, max(ends)) if ends else None
