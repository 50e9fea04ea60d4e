"""`cupy.cuda.nccl` for ranks that are threads: the same names and behaviour, on the CPU's memory."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .fake_device import stream_of_thread, the_rest_is_the_gpus

_TYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    3: torch.uint32,
    4: torch.int64,
    5: torch.uint64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
_INVALID, _MISUSED, _ABORTED = 4, 5, 6
_ID_BYTES = 128
_OPS = range(5)
_PATIENCE_S = 60.0


class NcclError(RuntimeError):
    """The error, as in CuPy."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.is_abort = status == _ABORTED


class _Call(NamedTuple):
    """A collective as each rank calls it; `agreed` must be the same everywhere."""

    agreed: tuple[Any, ...]
    source: torch.Tensor
    target: torch.Tensor


@dataclass
class _Clique:
    """The shared part of the communicators with one id: a meeting place, mailboxes, and the connections that were asked for."""

    size: int
    barrier: threading.Barrier = field(init=False)
    calls: dict[int, Any] = field(default_factory=dict)
    mail: dict[tuple[int, int], queue.Queue[bytes]] = field(init=False)
    connecting: set[tuple[int, int, bool]] = field(default_factory=set)
    is_aborted: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.mail = {pair: queue.Queue() for pair in itertools.permutations(range(self.size), 2)}

    def show(self, rank: int, said: Any) -> list[Any]:
        """All ranks' values, by rank. A rank that reads memory of others must `meet` before it leaves this memory."""
        self.calls[rank] = said
        self.meet()
        everything = [self.calls[other] for other in range(self.size)]
        self.meet()
        return everything

    def meet(self) -> None:
        try:
            self.barrier.wait(_PATIENCE_S)
        except threading.BrokenBarrierError:
            raise NcclError(_ABORTED, "remote process exited or there was a network error") from None

    def abort(self) -> None:
        self.is_aborted.set()
        self.barrier.abort()


class FakeNccl:
    """Stands in for the module `cupy.cuda.nccl`; the ranks, each a thread, share one.

    It behaves as NCCL does:

    - Calls in a group start at its end, sends and receives together.
    - The first send from one rank to another, and the first receive, block the CPU until the other rank has called its
      counterpart. A send is over when it was received.
    - Sums are rounded to the dtype at each step. AVG first multiplies by 1/size; for integers it divides at the end, and rounds
      to zero. MIN and MAX drop a not-a-number.
    - A communicator is not given back while a CUDA graph refers to it.
    - A rank that is alone does its work at once; in place there is none.
    - Collectives that differ between the ranks, in their element count for example, never end. Only an abort ends them.

    As CuPy does, it refuses an id that is not 128 bytes, arguments that are not integers, and communicators that were aborted
    or given back.

    Args:
        version: the result of `get_version`.
        launched: called for each collective with its stream, and the memory that it reads and writes.
    """

    NcclError = NcclError

    def __init__(
        self, version: int = 22_707, launched: Callable[[int, torch.Tensor, torch.Tensor], object] | None = None
    ) -> None:
        self._version = version
        self.launched = launched
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._cliques: dict[bytes, _Clique] = {}
        self._thread = threading.local()

    def get_version(self) -> int:
        """The version: 10000 for the first, 100 for the second, 1 for the third number."""
        return self._version

    def get_unique_id(self) -> bytes:
        """128 bytes."""
        return next(self._numbers).to_bytes(_ID_BYTES, "big")

    def groupStart(self) -> None:  # noqa: N802 - CuPy's name
        """Groups of one thread may be nested."""
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        if self._thread.depth == 1:
            self._thread.postponed = []

    def groupEnd(self) -> None:  # noqa: N802 - CuPy's name
        """Start the calls since `groupStart`."""
        self._thread.depth -= 1
        if self._thread.depth == 0:
            postponed, self._thread.postponed = self._thread.postponed, []  # an ending thread must hold no tensor
            _run_group(postponed)

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> FakeCommunicator:  # noqa: N802, N803 - CuPy's names
        """Meet the other ranks with this id."""
        if type(commId) is not bytes:
            raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {type(commId).__name__})")
        if len(commId) != _ID_BYTES:
            raise ValueError(f"commId length {len(commId)} != {_ID_BYTES}.")
        _integers(ndev, rank)
        return self._join(commId, ndev, rank)

    def _join(self, key: bytes, size: int, rank: int) -> FakeCommunicator:
        with self._lock:
            clique = self._cliques.setdefault(key, _Clique(size))
        clique.meet()
        return FakeCommunicator(self, clique, key, rank)

    def _call(self, operation: _Operation) -> None:
        if getattr(self._thread, "depth", 0):
            self._thread.postponed.append(operation)
        else:
            _run_group([operation])


@dataclass
class _Operation:
    """One call: its begin and end on the GPU, and, between two ranks, the connection by the CPU."""

    begin: Callable[[], None]
    end: Callable[[], None]
    connect: Callable[[], None] | None = None
    sends: bool = False


def _run_group(operations: Sequence[_Operation]) -> None:
    transfers = [operation for operation in operations if operation.connect is not None]
    for operation in transfers:
        assert operation.connect is not None
        operation.connect()
    the_rest_is_the_gpus()
    for operation in operations:
        if operation.connect is None:
            operation.begin()
    for operation in transfers:
        operation.begin()
    for operation in sorted(transfers, key=lambda operation: operation.sends):
        operation.end()


class FakeCommunicator:
    """The communicator, as CuPy's `NcclCommunicator`."""

    def __init__(self, nccl: FakeNccl, clique: _Clique, key: bytes, rank: int) -> None:
        self._nccl = nccl
        self._clique = clique
        self._key = key
        self._rank = rank
        self._splits = itertools.count()
        self._is_gone = False
        self._error: NcclError | None = None
        self._no_graph = threading.Event()
        self._no_graph.set()

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        """Every rank computes the same result."""
        self._use(sendbuf, recvbuf, count, datatype, op=op, stream=stream)
        source, target = _memory(sendbuf, count, datatype), _memory(recvbuf, count, datatype)
        self._collective(_Call(("allReduce", count, datatype, op), source, target), stream, lambda terms: _reduce(op, terms))

    def reduce(
        self,
        sendbuf: int,
        recvbuf: int,
        count: int,
        datatype: int,
        op: int,
        root: int,
        stream: int,
    ) -> None:
        """Only the root writes the result."""
        self._use(sendbuf, recvbuf, count, datatype, root, op=op, stream=stream)
        source, target = _memory(sendbuf, count, datatype), _memory(recvbuf, count, datatype)
        call = _Call(("reduce", count, datatype, op, root), source, target)
        self._collective(call, stream, lambda terms: _reduce(op, terms) if self._rank == root else None)

    def reduceScatter(  # noqa: N802
        self,
        sendbuf: int,
        recvbuf: int,
        recvcount: int,
        datatype: int,
        op: int,
        stream: int,
    ) -> None:
        """Part r goes to rank r."""
        self._use(sendbuf, recvbuf, recvcount, datatype, op=op, stream=stream)
        mine = slice(self._rank * recvcount, (self._rank + 1) * recvcount)
        source, target = _memory(sendbuf, recvcount * self._clique.size, datatype), _memory(recvbuf, recvcount, datatype)
        call = _Call(("reduceScatter", recvcount, datatype, op), source, target)
        self._collective(call, stream, lambda terms: _reduce(op, [term[mine] for term in terms]))

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Send the root's data to all ranks."""
        self._use(sendbuff, recvbuff, count, datatype, root, stream=stream)
        source, target = _memory(sendbuff, count, datatype), _memory(recvbuff, count, datatype)
        self._collective(_Call(("broadcast", count, datatype, root), source, target), stream, lambda terms: terms[root].clone())

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        """Put the parts of all ranks one after the other."""
        self._use(sendbuf, recvbuf, count, datatype, stream=stream)
        source, target = _memory(sendbuf, count, datatype), _memory(recvbuf, count * self._clique.size, datatype)
        self._collective(_Call(("allGather", count, datatype), source, target), stream, torch.cat)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Send; over when the data are received."""
        self._use(sendbuf, count, datatype, peer, stream=stream)
        box = self._clique.mail[self._rank, peer]
        source = _memory(sendbuf, count, datatype)
        self._nccl._call(
            _Operation(
                lambda: box.put(_bytes(source)),
                lambda: self._until(lambda: box.unfinished_tasks == 0),
                self._connecting(self._rank, peer, sends=True),
                sends=True,
            )
        )

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Block until the data are there."""
        self._use(recvbuf, count, datatype, peer, stream=stream)
        target = _memory(recvbuf, count, datatype)
        connect = self._connecting(peer, self._rank, sends=False)
        self._nccl._call(_Operation(lambda: None, lambda: self._receive(peer, target), connect))

    def commSplit(self, color: int, key: int) -> FakeCommunicator | None:  # noqa: N802
        """All ranks call it; those with one color meet, in the order of their keys."""
        self._use(color, key)
        if not -(2**31) <= color < 2**31:  # CuPy passes a C int
            raise OverflowError("value too large to convert to int")
        said = self._clique.show(self._rank, (color, key))
        number = next(self._splits)
        if color < 0:
            return None
        members = sorted((theirs, rank) for rank, (other, theirs) in enumerate(said) if other == color)
        rank = [member for _, member in members].index(self._rank)
        return self._nccl._join(b"%s/%d.%d" % (self._key, number, color), len(members), rank)

    def check_async_error(self) -> None:
        """Raise an operation's error, unless it was aborted here."""
        self._use()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Wake all threads inside an operation."""
        self._is_gone = True
        self._clique.abort()

    def destroy(self) -> None:
        """Wait until no graph refers to it."""
        self._no_graph.wait()
        self._is_gone = True

    def break_down(self, error: NcclError) -> None:
        """Let `check_async_error` report an error."""
        self._error = error

    def enter_a_graph(self) -> Callable[[], None]:
        """Let a CUDA graph refer to it, until the returned function is called."""
        assert self._clique.size > 1, "what NCCL does for one rank is no kernel of its own, so no graph refers to it"
        self._no_graph.clear()
        return self._no_graph.set

    def _use(self, *arguments: int, op: int = 0, stream: int | None = None) -> None:
        """Refuse what CuPy and NCCL refuse, and a stream other than the one with the copies before and after."""
        _integers(*arguments, op, *(() if stream is None else (stream,)))
        current = stream_of_thread()
        if self._clique.is_aborted.is_set() and current is not None:  # a real call came earlier, and is in its kernel now
            raise NcclError(_ABORTED, "remote process exited or there was a network error")
        if self._is_gone or op not in _OPS:
            raise NcclError(_INVALID, "invalid argument (run with NCCL_DEBUG=WARN for details)")
        assert stream is None or current is None or stream == current, f"stream {stream} was given, {current} is current"

    def _connecting(self, sender: int, receiver: int, *, sends: bool) -> Callable[[], None]:
        """Post this side at once, since calls in one group connect together; returns a function that waits for the other."""
        posted = self._clique.connecting

        def connect() -> None:
            self._until(lambda: (sender, receiver, not sends) in posted)

        posted.add((sender, receiver, sends))
        return connect

    def _collective(self, call: _Call, stream: int, compute: Callable[[list[torch.Tensor]], torch.Tensor | None]) -> None:
        if self._nccl.launched is not None:
            self._nccl.launched(stream, call.source, call.target)

        def alone() -> None:
            result = compute([call.source])
            if result is not None and call.target.data_ptr() != call.source.data_ptr():
                call.target.copy_(result)

        def begin() -> None:
            if self._clique.size == 1:
                alone()
                return
            calls = self._clique.show(self._rank, call)
            if any(other.agreed != call.agreed for other in calls):
                self._until(lambda: False)
            result = compute([other.source for other in calls])
            self._clique.meet()
            if result is not None:
                call.target.copy_(result)
            self._clique.meet()

        self._nccl._call(_Operation(begin, lambda: None))

    def _receive(self, peer: int, target: torch.Tensor) -> None:
        box = self._clique.mail[peer, self._rank]
        self._until(lambda: not box.empty())
        received = box.get()
        if len(received) != target.numel() * target.element_size():
            raise NcclError(
                _MISUSED, f"rank {peer} sent {len(received)} bytes, expected {target.numel() * target.element_size()}"
            )
        ctypes.memmove(target.data_ptr(), received, len(received))
        box.task_done()

    def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self._clique.is_aborted.wait(0.0002):
                raise NcclError(_ABORTED, "remote process exited or there was a network error")


def _integers(*arguments: int) -> None:
    """Check that arguments are integers. Cython refuses everything else: tensors, streams, floats."""
    for argument in arguments:
        if type(argument) is not int:
            raise TypeError(f"expected an int, found {argument!r}")


def _memory(address: int, count: int, datatype: int) -> torch.Tensor:
    dtype = _TYPES[datatype]
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _reduce(op: int, terms: list[torch.Tensor]) -> torch.Tensor:
    combine: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        0: torch.add,
        1: torch.mul,
        2: torch.fmax,
        3: torch.fmin,
        4: torch.add,
    }
    is_exact = not terms[0].is_floating_point()
    factor = 1 / len(terms)
    scaled = [term * torch.tensor(factor, dtype=term.dtype) for term in terms] if op == 4 and not is_exact else terms
    total = scaled[0].clone()
    for term in scaled[1:]:
        total = combine[op](total, term)
    return total.div_(len(terms), rounding_mode="trunc") if op == 4 and is_exact else total
