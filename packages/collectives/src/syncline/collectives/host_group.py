"""A process group made of a transport: total order, futures, time limits and errors, once for all host backends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta

import torch

from .deadline import Deadline
from .errors import CollectiveTimeout, GroupClosedError, SynclineError, TransportError
from .layout import in_plain_order
from .process_group import Collective, ProcessGroup
from .progress import Progress
from .reduce_op import ReduceOp
from .transport import Transport
from .work import FinishedWork, PendingWork, Work

Body = Callable[[Deadline], None]


class HostGroup(ProcessGroup):
    """Runs the blocking collectives of a `Transport` in one total order; see Note [One total order] in `progress`.

    A collective with `async_op=False` runs on the caller's thread when nothing is in flight (a hop to another thread costs
    more than a small collective), otherwise it is queued and waited for. After a failed collective the transport's state is
    unknown, so every later collective fails with a reference to the first failure.
    """

    def __init__(self, transport: Transport, rank: int, size: int, *, name: str = "default", timeout_s: float) -> None:
        super().__init__(rank, size, name=name, timeout_s=timeout_s)
        self._transport = transport
        self._progress = Progress(f"syncline-{name}-rank{rank}")
        self._sequence = itertools.count()
        self._closed = False
        self._first_failure: BaseException | None = None

    @property
    def backend_name(self) -> str:
        """The transport's name in the registry."""
        return self._transport.backend_name

    @property
    def device_types(self) -> frozenset[str]:
        """Only the CPU."""
        return frozenset({"cpu"})

    def describe(self) -> str:
        """The transport's own description."""
        return self._transport.describe()

    def close(self) -> None:
        """Run what was issued, then close the transport."""
        if self._closed:
            return
        self._closed = True
        drained = self._progress.drain(self.timeout_s)
        self._progress.stop()
        if drained and self._first_failure is None:
            self._transport.close()
        else:
            self._transport.abort()

    def abort(self) -> None:
        """Fail what is in flight and everything queued behind it."""
        if self._closed:
            return
        self._closed = True
        self._first_failure = self._first_failure or TransportError(f"the group was aborted on {self.place()}")
        self._transport.abort()
        self._progress.stop()

    # ---- the collectives ----

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work:
        call = Collective("all_reduce", (tensor,), f"op={op.name}")

        def body(deadline: Deadline) -> None:
            wire = in_plain_order(tensor)
            self._transport.all_reduce(wire, op, call, deadline)
            _copy_back(wire, tensor)

        return self._issue(call, [tensor], body, async_op)

    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work:
        call = Collective("broadcast", (tensor,), f"root={root}")

        def body(deadline: Deadline) -> None:
            wire = in_plain_order(tensor)
            self._transport.broadcast(wire, root, call, deadline)
            _copy_back(wire, tensor)

        return self._issue(call, [tensor], body, async_op)

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Work:
        call = Collective("all_gather", (tensor, *outputs))

        def body(deadline: Deadline) -> None:
            wires = [in_plain_order(output) for output in outputs]
            self._transport.all_gather(wires, in_plain_order(tensor), call, deadline)
            for wire, output in zip(wires, outputs, strict=True):
                _copy_back(wire, output)

        return self._issue(call, outputs, body, async_op)

    def _barrier(self, async_op: bool) -> Work:
        call = Collective("barrier")
        return self._issue(call, [], lambda deadline: self._transport.barrier(call, deadline), async_op)

    # ---- from a call to a running collective ----

    def _issue(self, call: Collective, outputs: list[torch.Tensor], body: Body, async_op: bool) -> Work:
        self._check_open(call)
        sequence = next(self._sequence)
        if not async_op:
            outcome: list[BaseException | None] = []
            if self._progress.run_here(lambda: outcome.append(self._run(call, sequence, body))):
                error = outcome[0]
                if error is not None:
                    raise error
                return FinishedWork(outputs)
        work = _GroupWork(outputs, lambda: self._in_words(call, sequence), self._progress)
        self._progress.enqueue(lambda: self._run_into(work, call, sequence, body))
        if not async_op:
            work.wait()
        return work

    def _run_into(self, work: PendingWork, call: Collective, sequence: int, body: Body) -> None:
        error = self._run(call, sequence, body)
        if error is None:
            work.succeed()
        else:
            work.fail(error)

    def _run(self, call: Collective, sequence: int, body: Body) -> BaseException | None:
        """Run one collective to its end and return, rather than raise, what went wrong."""
        if self._first_failure is not None:
            return self._failed_before(call, sequence)
        try:
            with torch.no_grad():
                body(Deadline(self.timeout_s))
        except TimeoutError as error:
            self._first_failure = self._timed_out(call, sequence, error)
        except SynclineError as error:
            self._first_failure = type(error)(f"{self._in_words(call, sequence)}: {error}")
            self._first_failure.__cause__ = error.__cause__
        except BaseException as error:  # noqa: BLE001 - a waiter on another thread must get it, whatever it is
            self._first_failure = error
        return self._first_failure

    def _check_open(self, call: Collective) -> None:
        if self._closed:
            raise GroupClosedError(
                f"{call.name} on {self.place()}: the group is closed; create it again with init_process_group or new_group"
            )

    def _in_words(self, call: Collective, sequence: int) -> str:
        return f"{call.signature()}, number {sequence} on {self.place()}"

    def _timed_out(self, call: Collective, sequence: int, error: TimeoutError) -> CollectiveTimeout:
        timeout = CollectiveTimeout(
            f"{self._in_words(call, sequence)}, did not finish within {self.timeout_s:g} s: {error}. Look for a rank that "
            "died, left early, or issued other collectives; a longer time limit is the `timeout` of init_process_group"
        )
        timeout.__cause__ = error
        return timeout

    def _failed_before(self, call: Collective, sequence: int) -> TransportError:
        error = TransportError(
            f"{self._in_words(call, sequence)}, was not started because the group had failed before: {self._first_failure}"
        )
        error.__cause__ = self._first_failure
        return error


class _GroupWork(PendingWork):
    """A pending work that may be waited for inside a callback of its own group."""

    __slots__ = ("_progress",)

    def __init__(self, tensors: list[torch.Tensor], describe: Callable[[], str], progress: Progress) -> None:
        super().__init__(tensors, describe)
        self._progress = progress

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until finished; inside a callback, run the group's queue up to this collective."""
        if self._progress.is_running_here():
            self._progress.run_until(self.is_completed)
        return super().wait(timeout)


def _copy_back(wire: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the copy in plain order back to the tensor that it stands for."""
    if wire is not tensor:
        tensor.copy_(wire)
