"""A `Transport` moves the tensors of a group. A `Plan` carries out all calls that have the same signature (`engine.call`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..health.liveness import Liveness
from ..health.stalls import StatusPost
from ..reduce_op import Reduction
from ..tensors.layout import flat
from .call import Call, Signature
from .cancel_scope import CancelScope

if TYPE_CHECKING:
    import torch.distributed as dist


class Request(ABC):
    """A send or receive that was started."""

    @abstractmethod
    def wait(self, scope: CancelScope) -> None:
        """Block until the request is over. Only one thread at a time calls this method.

        The program's tensor may require a gradient. So if this method or `test` copies a message to this tensor with torch,
        the method must do so in the context `tensors.layout.untracked`.

        Raises:
            TimeoutError: the scope's time limit was reached. The caller may wait again. But over Gloo the next wait raises a
                `TransportError`, because Gloo closes the connection.
            TransportError: the transfer failed.
            BaseException: the scope was cancelled with this error.
        """

    @abstractmethod
    def test(self) -> bool:
        """Whether the request is over. Never blocks.

        If the library cannot tell without waiting, return False until `wait` has returned.
        """

    @abstractmethod
    def source(self) -> int | None:
        """Return the sender's rank. Call this method only for a receive that is over."""


class Plan(ABC):
    """Carries out all calls that have the same signature. The constructor makes all decisions that do not depend on tensors.

    A group runs one call at a time. A plan keeps no tensor alive, and communicates only when it runs.
    """

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """The name of the algorithm that the latest run used, for logs and for `ProcessGroup.algorithm_of`."""

    @abstractmethod
    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        """Carry out one call. Return when this rank has done its share of the call.

        Args:
            part: this rank's tensor, contiguous, of any shape.
            whole: a tensor with one part for each rank. In an all-reduce, reduce or broadcast, `part` itself. In a gather or
                scatter, None except on the root. In an all-to-all, the input; `part` is the output.
            call: the call. When the call's `CancelScope` ends, the plan must stop waiting and raise an error.

        Raises:
            TimeoutError: the scope's time limit was reached. If possible, the text says which ranks did not take part.
            SynclineError: the scope was cancelled with this error, the ranks disagree, or the library failed.
        """


class Transport(ABC):
    """Moves the tensors of one group, by calls of one library. Write a subclass to add a backend.

    `HostGroup` makes a process group of a transport. A `Plan` carries out a collective: `HostGroup` gets plans from `plan` and
    runs one plan at a time, on any thread. Any thread may call `start_send` and `start_recv`, also while a collective runs.

    For a library with blocking collectives on host memory, write a subclass of `LibraryTransport` instead.

    Five methods end calls, or the transport. Some of these methods wake threads: the wait of such a thread raises an error::

        method            who calls it                                           may block   who is woken, if the library can
        give_up           `HostGroup`, when a call has failed                    no          other ranks
        interrupt         `HostGroup` and the monitor, on a separate thread      yes         the running call, other ranks
        abort             `HostGroup`, in `abort`, and in `close` after a        no          other ranks, other threads
                          failure or with calls in flight
        close             `HostGroup`, when no call is in flight                 yes         nobody
        leave_to_parent   `HostGroup`, in a forked child                         no          nobody

    When ranks are lost, Syncline connects the remaining ranks by a new transport. Then Syncline also calls `interrupt` and
    `abort` of the old transport, and of a new transport that could not connect all ranks.
    """

    #: The registry's name of the backend, such as "mpi".
    backend_name: str

    #: Whether the ranks may call `close` only together. If True and one rank does not close the group, no rank calls `close`.
    closes_together: bool = False

    #: Finds out which ranks are lost; None if the transport does not know their processes.
    liveness: Liveness | None = None

    @property
    def compares_every_call(self) -> bool:
        """Whether this transport compares the ranks' calls before each call runs. The value is the same on all ranks.

        If False, `HostGroup` compares the calls: before each call if the group has `check_calls`, and otherwise later.
        Without `check_calls` a call may therefore run although the ranks disagree. See Note [Comparison of calls] in
        `health.agreement`.
        """
        return False

    @abstractmethod
    def describe(self) -> str:
        """Return the name and version of the library that communicates, as a short text."""

    # ---- collectives ----

    @abstractmethod
    def plan(self, signature: Signature) -> Plan:
        """Return a plan: an object that carries out all calls of one signature. The method does not communicate.

        A signature is the kind of a call: name, reduction, root, dtype and shape. All plans of one signature must send and
        receive the same messages, because one rank may use an old plan while another rank uses a new plan.
        """

    @abstractmethod
    def barrier(self, call: Call) -> None:
        """Return when all ranks have called this method."""

    def allocate(self, numel: int, dtype: torch.dtype, call: Call) -> torch.Tensor:  # noqa: ARG002 - for transports that share memory
        """Allocate a flat, uninitialised tensor, in memory from which the transport communicates fastest.

        All ranks call this method with the same arguments.
        """
        return torch.empty(numel, dtype=dtype, device="cpu")

    # ---- two ranks ----

    @abstractmethod
    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        """Begin to send a flat, contiguous tensor to rank `dst`. The method must not wait for the receiver."""

    @abstractmethod
    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        """Begin to receive a message into a flat, contiguous tensor. The method must not wait for the sender.

        The message comes from rank `src`, or from any rank if `src` is None. The sender has passed the same `tag`.
        """

    # ---- life ----

    @abstractmethod
    def subset(self, members: Sequence[int], name: str, number: int, scope: CancelScope) -> Transport:
        """Return a transport for a group of some of the ranks. Only the ranks `members` call this method.

        The first rank in `members` becomes rank 0 of the new transport, and so on. All members pass the same `name` and the
        same `number` (0 or above). No other open group has this name. Over MPI, for example, the number becomes a tag.
        """

    def meeting_store(self) -> dist.Store | None:
        """Return the store in which the ranks found each other, or None if there is no store.

        See [`ProcessGroup.meeting_store`][syncline.collectives.ProcessGroup.meeting_store].
        """
        return None

    def status_post(self) -> StatusPost | None:
        """Return an object that sends short texts to rank 0, also while a collective runs.

        Rank 0 makes stall warnings from these texts. If the result is None, the group gives no stall warnings.
        """
        return None

    def give_up(self) -> None:  # noqa: B027 - most libraries have no way to say it
        """Tell the other ranks that this rank's call has failed, so that they need not wait until their time limit.

        If the library cannot tell them, do nothing. This method must not block.
        """

    # See Note [Forks] in `forks`.
    def leave_to_parent(self) -> None:  # noqa: B027 - most objects can be dropped
        """In a forked child, drop the library's objects without freeing them, because they belong to the parent process."""

    def lost_ranks(self) -> Sequence[int]:
        """Return the failed ranks that the communication library, such as MPI, knows of. This method must not block."""
        return ()

    def interrupt(self) -> None:  # noqa: B027 - most libraries return by themselves
        """End the call that runs on another thread, if the library can. That call then raises an error.

        This method may block. Afterwards the group starts no call.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all connections and memory, when the group closes in order. No call is in flight."""

    @abstractmethod
    def abort(self) -> None:
        """End the waits of other ranks and other threads as soon as possible, if the library can. Those waits raise an error.

        This method must not block, so it need not release memory or connections.
        """


class LibraryTransport(Transport):
    """A transport for a library with blocking collectives on host memory.

    A subclass implements the abstract methods below, by these rules:

    - Each method blocks until this rank's share of the collective is done.
    - Tensors are flat and contiguous, on the CPU, and of any dtype. A "block" is a tensor with one part of equal size for each
      rank.
    - While a method waits, it calls `call.scope.check`, and does not catch the errors of `check`.
    - Turn an error of the library into a `TransportError` (`raise TransportError(...) from error`).
    """

    def plan(self, signature: Signature) -> Plan:
        """Make a `LibraryPlan`."""
        return LibraryPlan(self, signature)

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Call) -> None:
        """Reduce the tensors of all ranks in place. All ranks must get the same bits."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction, call: Call) -> None:
        """Reduce the tensors of all ranks into the root's tensor. The other ranks' tensors must not change."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, call: Call) -> None:
        """Copy the root's tensor to the tensors of all ranks."""

    @abstractmethod
    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: Call) -> None:
        """Copy rank r's tensor into part r of the block, on every rank. `tensor` may be this rank's part of the block."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """Copy rank r's tensor into part r of the root's block."""

    @abstractmethod
    def scatter(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """Copy part r of the root's block into rank r's tensor."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: Call) -> None:
        """Reduce the blocks of all ranks, and write part r of the result to rank r's tensor.

        `tensor` may be a part of the block. Other parts of the block must not change.
        """

    @abstractmethod
    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        call: Call,
    ) -> None:
        """Send `input_counts[r]` elements to rank r, and receive `output_counts[r]` elements from rank r.

        `tensor` has the parts to send, and `output` gets the received parts, both in the order of ranks.
        """


class LibraryPlan(Plan):
    """Carries out a collective by calling the method of a `LibraryTransport` for this collective."""

    def __init__(self, transport: LibraryTransport, signature: Signature) -> None:
        self._transport = transport
        self._signature = signature

    @property
    def algorithm(self) -> str:
        """The backend's name, because the library chooses the algorithm itself."""
        return self._transport.backend_name

    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        """See `Plan.run`."""
        transport, signature = self._transport, self._signature
        part, block = flat(part), None if whole is None else flat(whole)
        match signature.name:
            case "all_reduce":
                transport.all_reduce(part, signature.reduction, call)
            case "reduce":
                transport.reduce(part, signature.root_rank, signature.reduction, call)
            case "broadcast":
                transport.broadcast(part, signature.root_rank, call)
            case "gather":
                transport.gather(part, block, signature.root_rank, call)
            case "scatter":
                transport.scatter(part, block, signature.root_rank, call)
            case name:  # in all other collectives, every rank has a block
                assert block is not None
                self._run_on_block(name, part, block, call)

    def _run_on_block(self, name: str, part: torch.Tensor, block: torch.Tensor, call: Call) -> None:
        transport, signature = self._transport, self._signature
        match name:
            case "all_gather" | "all_gather_into_tensor":
                transport.all_gather(block, part, call)
            case "reduce_scatter" | "reduce_scatter_tensor":
                transport.reduce_scatter(part, block, signature.reduction, call)
            case "all_to_all" | "all_to_all_single":
                assert signature.splits is not None
                transport.all_to_all(part, block, *signature.splits, call)
            case _:
                raise AssertionError(f"no collective {name}")
