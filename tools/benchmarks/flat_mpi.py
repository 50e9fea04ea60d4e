"""The solution without this package: MPI's own all-reduce over all ranks, in a thread beside backward."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from syncline.hooks.contract import Bucket, TensorFuture, communication_hook

from .contenders import Wrap, with_hook


class FlatMPI:
    """The state of `flat_mpi_hook`: a communicator, and the one thread that uses it, which keeps the buckets in order."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._sum = MPI.SUM
        self._in_place = MPI.IN_PLACE
        self._communicator = MPI.COMM_WORLD.Dup()
        self._thread = ThreadPoolExecutor(1)

    def start(self, buffer: torch.Tensor) -> TensorFuture:
        """Average a buffer of floats over all ranks, in place."""
        future: TensorFuture = torch.futures.Future()
        self._thread.submit(self._average, buffer, future)
        return future

    def _average(self, buffer: torch.Tensor, future: TensorFuture) -> None:
        try:
            self._communicator.Allreduce(self._in_place, buffer.numpy(), self._sum)
            future.set_result(buffer.div_(self._communicator.Get_size()))
        except Exception as error:  # noqa: BLE001 - whoever waits for the bucket shall get it
            future.set_exception(error)  # type: ignore[arg-type]  # torch says "result: T"


@communication_hook
def flat_mpi_hook(state: FlatMPI, bucket: Bucket) -> TensorFuture:
    """Average a bucket by one call of MPI."""
    return state.start(bucket.buffer())


def over_flat_mpi(wrap: Wrap) -> Wrap:
    """A DDP whose buckets MPI reduces by itself."""
    return with_hook(wrap, lambda _: FlatMPI(), flat_mpi_hook)
