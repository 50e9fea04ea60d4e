"""From a call to a stream: connects when needed, issues in order, and has everything watched."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ...collective import Collective
from ...deadline import Deadline
from ...errors import GroupClosedError, InvalidArgumentError, MisuseError, SynclineError, TransportError
from ...layout import untracked
from .accelerator import Moment
from .algorithms import Body
from .batch import Batch
from .communicator import Communicator
from .connector import Connector, Link
from .pair import Pair
from .watchdog import Watchdog
from .work import Description, NcclWork


class Engine:
    """Puts collectives on the group's stream; see Note [Order over NCCL] in `process_group`.

    Args:
        connector: how the ranks are connected.
        place: says where an error happened.
        timeout_s: how long one collective may take.
        link: the communicator of all ranks, if there is one already.
    """

    def __init__(self, connector: Connector, place: Callable[[], str], timeout_s: float, link: Link | None) -> None:
        self._connector = connector
        self._accelerator = connector.accelerator
        self._place = place
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # held while a collective is issued: an issue is one
        self._watchdog = Watchdog(
            f"syncline-nccl-{connector.name}-rank{connector.rank}", place, self._accelerator.watch_from_here
        )
        self._sequence = itertools.count()
        self._is_closed = False
        self._batch: Batch | None = None
        self._batch_work: NcclWork | None = None
        self._communicators: list[Communicator] = []
        self._pairs: dict[int, Pair] = {}
        self._link = None if link is None else self._adopt(link)

    @property
    def device(self) -> torch.device:
        """The GPU that the group serves, or will serve if a collective without a tensor comes first."""
        return self._accelerator.current_device() if self._link is None else self._link.device

    # ---- the end ----

    def close(self) -> bool:
        """Let the GPU finish and give the communicators back; false if it was closed before."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
        if self._watchdog.drain(self._timeout_s):
            self._watchdog.stop()
            for communicator in self._communicators:
                communicator.destroy()
        else:
            self._watchdog.fail(
                TransportError(f"what was in flight did not finish when the group was closed on {self._place()}")
            )
            self._watchdog.stop()
        return True

    def abort(self) -> None:
        """End what is in flight. Does not take the lock: its holder may be stuck in NCCL."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watchdog.fail(TransportError(f"the group was aborted on {self._place()}"))
        self._watchdog.stop()

    # ---- collectives ----

    def issue(
        self,
        call: Collective,
        body: Body,
        outputs: list[torch.Tensor],
        reads: Sequence[torch.Tensor] = (),
        *,
        async_op: bool,
        in_steps: bool = False,
        blocks: bool = False,
    ) -> NcclWork:
        """Put a collective on the group's stream.

        Args:
            call: for messages.
            body: what is done; see `algorithms`.
            outputs: what is written, or read and written; with `reads` all on one GPU.
            reads: what is only read.
            async_op: do not wait.
            in_steps: it calls NCCL several times.
            blocks: its `wait` blocks the CPU.
        """
        device = self._device_of(call, [*outputs, *reads])
        with self._lock:
            self._check_usable(call)
            if self._batch is not None and self._batch.is_here():
                return self._add_to_batch(
                    call, body, outputs, reads, device, is_one_call=async_op and not in_steps and not blocks
                )
            link = self._connected(call, device)
            work = self._new_work(call, outputs, reads, device, blocks=blocks)
            self._watch(work)
            self._put(link, work, _delivering(body), self._accelerator.now(device))
        if not async_op:
            work.wait()
        return work

    @contextmanager
    def coalescing(self) -> Iterator[None]:
        """See `NcclGroup.coalescing`."""
        call = Collective("coalesced")
        with self._lock:
            if self._batch is not None:
                raise MisuseError(f"coalescing on {self._place()}: another coalescing context is open; close it first")
            batch = self._batch = Batch()
        try:
            yield
        except BaseException as error:
            if self._batch_work is not None:
                self._batch_work.fail(error)
            raise
        finally:
            work = self._batch_work
            with self._lock:
                self._batch = self._batch_work = None
        if work is not None:
            with self._lock:
                self._check_usable(call)
                assert self._link is not None
                work.hold(batch.reads)
                self._watch(work)
                self._put(self._link, work, batch.run, self._accelerator.now(self._link.device))

    def split(self, members: Sequence[int] | None, color: int | None, deadline: Deadline) -> Link | None:
        """A part's communicator, by ncclCommSplit where this group is connected; else the part connects when it is used."""
        call = Collective("split")
        with self._lock:
            self._check_usable(call)
            if self._link is None:
                return None
            if not self._watchdog.drain(deadline.remaining_s()):
                self._check_usable(call)
                raise TransportError(f"split on {self._place()}: what was in flight did not finish in {deadline.timeout_s:g} s")
            return self._connector.split(self._link, members, color, deadline)

    def _add_to_batch(
        self,
        call: Collective,
        body: Body,
        outputs: Sequence[torch.Tensor],
        reads: Sequence[torch.Tensor],
        device: torch.device,
        *,
        is_one_call: bool,
    ) -> NcclWork:
        if not is_one_call:
            raise MisuseError(
                f"{call.signature()} on {self._place()} cannot be coalesced: it waits, or NCCL needs several steps for it; "
                "pass async_op=True, or issue it outside"
            )
        assert self._batch is not None
        self._connected(call, device)
        if self._batch_work is None:
            self._batch_work = self._new_work(Collective("coalesced"), self._batch.outputs, (), device)
        self._batch.add(body, outputs, reads)
        return self._batch_work

    # ---- transfers ----

    def transfer(self, call: Collective, body: Body, tensor: torch.Tensor, direction: tuple[int, int]) -> NcclWork:
        """Put a send or a receive on the stream of its direction, a pair (sender, receiver)."""
        device = self._device_of(call, [tensor])
        sender, receiver = direction
        mine = self._connector.rank
        with self._lock:
            self._check_usable(call)
            pair = self._pair_with(receiver if sender == mine else sender, call, device)
            work = self._new_work(call, [tensor], (), device, source=sender if receiver == mine else None)
            self._watch(work)
        after = self._accelerator.now(device)
        pair.submit(direction, lambda link: self._put(link, work, _delivering(body), after))
        return work

    def _pair_with(self, peer: int, call: Collective, device: torch.device) -> Pair:
        pair = self._pairs.get(peer)
        if pair is None:

            def connect() -> dict[tuple[int, int], Link]:
                links = self._connector.of_two(peer, device, Deadline(self._timeout_s))
                return {direction: self._adopt(link) for direction, link in links.items()}

            pair = self._pairs[peer] = Pair(connect, self._watchdog.fail)
        if not pair.is_connected:
            self._refuse_capture(call)
        return pair

    # ---- connecting ----

    def _connected(self, call: Collective, device: torch.device) -> Link:
        if self._link is None:
            self._refuse_capture(call)
            self._link = self._adopt(self._connector.of_all(device, Deadline(self._timeout_s)))
        if self._link.device != device:
            raise InvalidArgumentError(
                f"{call.signature()} on {self._place()}: the group serves {self._link.device}, the GPU of its first "
                f"collective, found tensors on {device}; make a group for each GPU (new_group), and choose this rank's GPU by "
                "torch.cuda.set_device"
            )
        return self._link

    def _adopt(self, link: Link) -> Link:
        self._communicators.append(link.communicator)
        self._watchdog.attach(link.communicator)
        return link

    def _refuse_capture(self, call: Collective) -> None:
        if self._accelerator.is_capturing():
            raise MisuseError(
                f"{call.signature()} on {self._place()}: NCCL cannot be connected while a CUDA graph is captured; issue the "
                "same collective once before the capture (a warm-up step does)"
            )

    # ---- issuing ----

    def _new_work(
        self,
        call: Collective,
        outputs: list[torch.Tensor],
        reads: Sequence[torch.Tensor],
        device: torch.device,
        *,
        blocks: bool = False,
        source: int | None = None,
    ) -> NcclWork:
        return NcclWork(
            outputs,
            reads,
            Description(call, next(self._sequence), self._place),
            self._accelerator,
            device,
            timeout_s=self._timeout_s,
            blocks=blocks,
            source=source,
        )

    def _watch(self, work: NcclWork) -> None:
        """From before it is issued: NCCL may never return. What is captured runs later, and elsewhere."""
        if not self._accelerator.is_capturing():
            self._watchdog.watch(work)

    def _put(self, link: Link, work: NcclWork, run: Callable[[Communicator], object], after: Moment) -> None:
        captured = self._accelerator.is_capturing()

        def issue() -> None:
            with untracked():
                run(link.communicator)

        try:
            moment = link.lane.run(issue, after)
        except BaseException as error:
            failure = self._failure_of(work, error)
            self._watchdog.fail(failure)
            if failure is error:
                raise
            raise failure from error
        work.is_issued_as(link.lane, moment, captured=captured)

    # ---- complaints ----

    def _device_of(self, call: Collective, tensors: Sequence[torch.Tensor]) -> torch.device:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            named = " and ".join(sorted(map(str, devices)))
            raise InvalidArgumentError(f"{call.signature()} on {self._place()}: expected all tensors on one GPU, found {named}")
        return next(iter(devices), self.device)

    def _check_usable(self, call: Collective) -> None:
        failure = self._watchdog.failure
        if self._is_closed:
            raise GroupClosedError(
                f"{call.name} on {self._place()}: the group is closed; create it again with init_process_group or new_group"
            )
        if failure is not None:
            raise TransportError(
                f"{call.signature()} on {self._place()} was not started because the group had failed before: {failure}"
            ) from failure

    def _failure_of(self, work: NcclWork, error: BaseException) -> BaseException:
        """What is wrong with the group: if it failed while the work was issued, that; else what was raised now."""
        if self._watchdog.failure is not None:
            return self._watchdog.failure
        if isinstance(error, SynclineError):
            return type(error)(f"{work.describe()}: {error}")
        return error


def _delivering(body: Body) -> Callable[[Communicator], None]:
    """A body with what it leaves to be done."""

    def run(comm: Communicator) -> None:
        deliver = body(comm)
        if deliver is not None:
            deliver()

    return run
