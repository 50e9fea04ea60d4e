"""Finds races of streams without a GPU, by torch's CUDA sanitizer over the fakes.

`torch.cuda._sanitizer` has a checker with vector clocks. It is told about kernels, events and waits, and reports two kernels
that use the same memory on two streams without an order between them. Here the kernels are torch's operations on the CPU, and
the streams are those of a `FakeDevice`, on which everything runs at once. NCCL is a fake for one rank, whose calls are kernels,
too.

Autograd runs each node on the stream that was current when the node was made. For tensors of the CPU it has no streams, so
`RaceChecker.backward` does the same as autograd's engine does for CUDA: see Note [Streams of autograd].
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, ArgumentHandler, EventHandler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from syncline.collectives.engine.device import Event
from syncline.collectives.transports.nccl.connections import Connector
from syncline.collectives.transports.nccl.group import NcclGroup
from syncline.collectives.transports.nccl.rendezvous import StoreRendezvous
from test_support.fake_device import FakeDevice, FakeEvent, FakeStream
from test_support.fake_nccl import FakeNccl
from test_support.fake_nccl_group import NcclGroupOnFakes

_WORD_BYTES = 4
_SMALL_BYTES = 4096
_STREAM = "stream on which this node was made"


class RaceChecker:
    """Follows one thread: its kernels, their streams, and its waits.

    Attributes:
        races: the races found, in words.
        device: the device of the streams.
        group: a group over NCCL of one rank.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self._handler = EventHandler()
        self._thread = threading.get_ident()
        self._events = itertools.count(1)
        self._memory: dict[int, torch.UntypedStorage] = {}  # held, so that no other tensor gets the same address
        self.device = _Device(self)
        nccl = FakeNccl(launched=self._launched_by_nccl)
        connector = Connector(nccl, self.device, StoreRendezvous(dist.HashStore()), [0], 0, "races")
        self.group: NcclGroup = NcclGroupOnFakes(connector, timeout_s=30)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which this thread is followed."""
        with ExitStack() as entered:
            entered.enter_context(_Launches(self))
            entered.enter_context(_Nodes(self))
            yield

    # ---- what the fakes say ----

    def recorded(self, stream: FakeStream) -> int:
        """An event of a stream; its number."""
        event = next(self._events)
        self._handler._handle_event_record(event, stream.handle)
        return event

    def waits(self, stream: FakeStream, event: int) -> None:
        """A stream waits for an event."""
        self._handler._handle_event_wait(event, stream.handle)

    def seen_to_be_over(self, event: int) -> None:
        """The CPU has waited for an event, so its later kernels come after it."""
        if threading.get_ident() == self._thread:  # a look by the monitor's thread orders nothing
            self._handler._handle_event_synchronization(event)

    def launched(self, stream: int, read: set[int], written: set[int], what: object) -> None:
        """A kernel that reads and writes words of memory."""
        names: dict[int, list[str]] = {word: [] for word in (*read, *written)}
        found = self._handler._handle_kernel_launch(stream, read - written, written, set(), what, names)  # type: ignore[arg-type]
        self.races += [str(error) for error in found[:1]]  # one for each kernel

    def memory_of(self, tensor: torch.Tensor) -> set[int]:
        """The words of a tensor's memory. A large storage counts as one word."""
        storage = tensor.untyped_storage()
        self._memory.setdefault(storage.data_ptr(), storage)
        if storage.nbytes() > _SMALL_BYTES:
            return {storage.data_ptr()}
        span = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return _words(tensor.data_ptr(), span * tensor.element_size() if tensor.numel() else 0)

    def _launched_by_nccl(self, stream: int, source: torch.Tensor, target: torch.Tensor) -> None:
        self.launched(stream, self._memory_at(source), self._memory_at(target), "NCCL")

    def _memory_at(self, tensor: torch.Tensor) -> set[int]:
        """The words of memory whose address alone is known."""
        begin = tensor.data_ptr()
        storages = self._memory.items()
        for start, storage in storages:
            if start <= begin < start + max(storage.nbytes(), 1) and storage.nbytes() > _SMALL_BYTES:
                return {start}
        return _words(begin, tensor.nbytes)

    # ---- autograd ----

    def made_here(self, parameters: Iterable[torch.Tensor]) -> None:
        """Existing nodes of these parameters, which some code holds, were made on the current stream.

        torch's functions show that an operation makes a node, but not that some code asks for a parameter's node.
        """
        for parameter in parameters:
            self.note_stream(get_gradient_edge(parameter).node)

    def note_stream(self, node: Any) -> None:
        """Note a node's stream. Nodes before it are noted already. The note lives as long as the node in C++."""
        nodes = [node]
        while nodes:
            one = nodes.pop()
            if one is not None and _STREAM not in one.metadata:
                one.metadata[_STREAM] = self.device.current()
                nodes += [following for following, _ in one.next_functions]

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()`, on the streams on which CUDA's autograd would run.

        Note [Streams of autograd]
        ~~~~~~~~~~~~~~~~~~~~~~~~~~
        1. A node, with its hooks, runs on its own stream: the stream that was current when it was made.
        2. Before it runs, its stream waits for the nodes that made its gradients, and for the place of the call of `backward`.
        3. Before the callbacks at the end of backward, the caller's stream waits for all nodes without successors.
        """
        caller = self.device.current()
        events: dict[Any, list[Event]] = {loss.grad_fn: [caller.record()]}
        leaves: list[Event] = []
        entered: list[Any] = []
        handles: list[Any] = []

        def leave() -> None:
            while entered:
                entered.pop().__exit__(None, None, None)

        def at_the_end() -> None:
            leave()
            for event in leaves:
                caller.wait_for(event)

        def hook(node: Any) -> None:
            stream: FakeStream = node.metadata[_STREAM]

            def before(*_: Any) -> None:
                leave()
                if node is loss.grad_fn:
                    torch.autograd.Variable._execution_engine.queue_callback(at_the_end)
                for event in events.pop(node, []):
                    stream.wait_for(event)
                entered.append(stream.current())
                entered[-1].__enter__()

            def after(*_: Any) -> None:
                event = stream.record()
                following = [one for one, _ in node.next_functions if one is not None]
                for one in following:
                    events.setdefault(one, []).append(event)
                if not following:
                    leaves.append(event)

            handles.extend((node.register_prehook(before), node.register_hook(after)))

        for node in _graph(loss.grad_fn):
            hook(node)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            leave()
            for handle in handles:
                handle.remove()


def _words(address: int, nbytes: int) -> set[int]:
    return set(range(address // _WORD_BYTES, (address + nbytes + _WORD_BYTES - 1) // _WORD_BYTES))


def _graph(root: Any) -> list[Any]:
    found: dict[Any, None] = {}
    todo = [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found[node] = None
            todo += [following for following, _ in node.next_functions]
    return list(found)


class _Event(FakeEvent):
    """An event that everything has reached, because streams run at once."""

    def __init__(self, device: _Device, stream: FakeStream) -> None:
        super().__init__(device)
        self._checker = device.checker
        self.number = self._checker.recorded(stream)

    def order_current_stream(self) -> None:
        self._checker.waits(self._device.current(), self.number)

    def is_over(self) -> bool:
        self._checker.seen_to_be_over(self.number)
        return True


class _Stream(FakeStream):
    """A stream whose work runs on the calling thread."""

    _runtime: _Device

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, _Event)
        self._runtime.checker.waits(self, event.number)

    def record(self) -> _Event:
        return _Event(self._runtime, self)

    def run(self, body: Any, after: Event | None) -> FakeEvent:
        if after is not None:
            self.wait_for(after)
        with self.current():
            body()
        return self.record()

    def catch_up(self) -> None:
        """Do nothing: no work is late."""


class _Device(FakeDevice):
    """A GPU that tells a checker of its streams and events."""

    stream_class = _Stream

    def __init__(self, checker: RaceChecker) -> None:
        self.checker = checker
        super().__init__()

    def now(self, device: torch.device) -> _Event:  # noqa: ARG002 - there is one
        return _Event(self, self.current())


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports torch's operations."""

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_factory = bool(FACTORY_FUNCTION_REGEX.match(func._schema.name))
        arguments = _Arguments(self._checker)
        arguments.parse_inputs(func._schema, args, kwargs or {}, is_factory=is_factory)
        outputs = func(*args, **(kwargs or {}))
        arguments.parse_outputs(func._schema, outputs, is_factory=is_factory)
        stream = self._checker.device.current().handle
        self._checker.launched(stream, arguments.dataptrs_read, arguments.dataptrs_written, func._schema)
        return outputs


class _Arguments(ArgumentHandler):
    """Takes tensors of the CPU, by the words of their memory."""

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__()
        self._checker = checker

    def _handle_argument(self, value: Any, is_write: bool, metadata_only: bool, *_: Any, **__: Any) -> None:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:  # a sparse tensor consists of two strided ones
            memory = self._checker.memory_of(value)
            if is_write:
                self.dataptrs_written |= memory
            elif not metadata_only:
                self.dataptrs_read |= memory


class _Nodes(TorchFunctionMode):
    """Notes the stream on which each node is made."""

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, list | tuple) else (outputs,):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                self._checker.note_stream(output.grad_fn)
        return outputs
