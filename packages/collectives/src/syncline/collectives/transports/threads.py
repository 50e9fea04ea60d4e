"""The backend "in_process", for tests: ranks are threads of one process. The module is the simplest example of a backend."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from ..engine.call import Call
from ..engine.cancel_scope import CancelScope
from ..engine.host_group import HostGroup
from ..engine.living_set import LivingSet
from ..engine.transport import LibraryTransport, Request, Transport
from ..errors import DisagreementError, InvalidArgumentError, LaunchError, TransportError
from ..health.statements import Statements, different_calls
from ..membership.reconnector import WAITING, Generation
from ..membership.shrinkable_group import ShrinkableGroup
from ..membership.store_reconnector import StoreReconnector
from ..reduce_op import Reduction
from ..startup.backend import Backend, ConnectRequest
from ..stores import InMemoryStore, Store
from ..tensors.layout import untracked
from ..tensors.reduction import reduce_in_rank_order, reduce_into


class _Receive:
    """A receive that has begun. `message` is None until the message has come."""

    def __init__(self, src: int | None, tag: int) -> None:
        self._src = src
        self._tag = tag
        self.message: tuple[int, torch.Tensor] | None = None

    def matches(self, src: int, tag: int) -> bool:
        return tag == self._tag and self._src in (None, src)


class SharedState:
    """The state that the ranks of a group share: rounds, messages and receives. The ranks are threads of one process.

    In a round, each rank calls `exchange` once, and gets the values of all ranks. A message goes to the oldest receive that
    matches. If no receive matches, the message waits.
    """

    def __init__(self, size: int, parent: SharedState | None = None) -> None:
        self.size = size
        self._parent = parent  # must live as long as this state: through the parent, `abort` reaches this state
        self._condition = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}
        self._departed: dict[int, int] = {}
        self._unreceived: dict[int, list[tuple[int, int, torch.Tensor]]] = defaultdict(list)  # source, tag, content
        self._receives: dict[int, list[_Receive]] = defaultdict(list)  # those without a message, in the order of their calls
        self._children: LivingSet[SharedState] = LivingSet()
        # By name and members: the children for which not all members have asked yet, each with the ranks that have asked.
        self._asked_for: defaultdict[tuple[str, tuple[int, ...]], list[tuple[SharedState, set[int]]]] = defaultdict(list)
        self._aborted = False

    def exchange(self, round_number: int, rank: int, value: Any, scope: CancelScope) -> list[Any]:
        """Give this rank's value to the other ranks, and return the values of all ranks in this round, in rank order.

        Raises:
            TimeoutError: some ranks did not come in time; the message names them.
            TransportError: the group was aborted.
        """
        with self._condition:
            arrived = self._rounds.setdefault(round_number, {})
            arrived[rank] = value
            self._condition.notify_all()
            self._wait_for(lambda: len(arrived) == self.size, scope, lambda: self._absent(arrived))
            self._depart(round_number)
            return [arrived[r] for r in range(self.size)]

    def send(self, src: int, dst: int, tag: int, tensor: torch.Tensor) -> None:
        """Give a message to the oldest receive that matches, or keep the message until a matching receive begins."""
        with self._condition:
            for receive in self._receives[dst]:
                if receive.matches(src, tag):
                    self._receives[dst].remove(receive)
                    receive.message = src, tensor
                    break
            else:
                self._unreceived[dst].append((src, tag, tensor))
            self._condition.notify_all()

    def receive(self, dst: int, src: int | None, tag: int) -> _Receive:
        """Begin to receive the oldest message with this tag from rank `src`, or from any rank if `src` is None."""
        receive = _Receive(src, tag)
        with self._condition:
            for message in self._unreceived[dst]:
                if receive.matches(message[0], message[1]):
                    self._unreceived[dst].remove(message)
                    receive.message = message[0], message[2]
                    return receive
            self._receives[dst].append(receive)
        return receive

    def collect(self, receive: _Receive, scope: CancelScope) -> tuple[int, torch.Tensor]:
        """Wait for the message of a receive. Return the sender's rank, and the tensor.

        Raises:
            TimeoutError: no message came in time.
            TransportError: the group was aborted.
        """
        with self._condition:
            self._wait_for(lambda: receive.message is not None, scope, lambda: "no message has come")
        assert receive.message is not None
        return receive.message

    def child(self, name: str, members: tuple[int, ...], rank: int) -> SharedState:
        """Return the shared state of a subset of the ranks.

        The first call of each member returns the same object. The second call of each member returns another object, and so on.
        """
        with self._condition:
            asked_for = self._asked_for[name, members]
            child, asked = next((entry for entry in asked_for if rank not in entry[1]), (None, set()))
            if child is None:
                child = SharedState(len(members), self)
                self._children.add(child)
                asked_for.append((child, asked))
            asked.add(rank)
            # Only the transports of the members hold the child from now on, so the child is freed with these transports.
            if len(asked) == len(members):
                asked_for.remove((child, asked))
                if not asked_for:
                    del self._asked_for[name, members]
            return child

    def abort(self) -> None:
        """Wake all waiting threads, in this group and in its subsets."""
        with self._condition:
            self._aborted = True
            self._condition.notify_all()
            children = list(self._children)
        for child in children:
            child.abort()

    def _wait_for(self, is_true: Callable[[], bool], scope: CancelScope, lack: Callable[[], str]) -> None:
        self._condition.wait_for(lambda: is_true() or self._aborted, scope.remaining_s())
        # If the condition is true, return, even if the group was aborted meanwhile.
        if not is_true():
            if self._aborted:
                raise TransportError(f"the group was aborted: {lack()}")
            scope.check(lack())
            raise TimeoutError(lack())

    def _absent(self, arrived: dict[int, Any]) -> str:
        return f"rank(s) {', '.join(str(r) for r in range(self.size) if r not in arrived)} have not called"

    def _depart(self, round_number: int) -> None:
        self._departed[round_number] = self._departed.get(round_number, 0) + 1
        # The last rank to leave frees the round, and with it the tensors that the ranks have shown.
        if self._departed[round_number] == self.size:
            del self._rounds[round_number], self._departed[round_number]


class InProcessTransport(LibraryTransport):
    """Carries out collectives between ranks that are threads of one process.

    Most collectives have two rounds. In the first round, each rank reads the tensors of all ranks. The second round is a
    barrier, after which a rank may overwrite its own tensor.
    """

    backend_name = "in_process"

    def __init__(self, shared_state: SharedState, rank: int) -> None:
        self._shared_state = shared_state
        self._rank = rank
        self._round = 0

    @property
    @override
    def compares_every_call(self) -> bool:
        """True, because in every round the ranks compare the texts that describe their calls."""
        return True

    def describe(self) -> str:
        """Return the backend's name and the number of threads."""
        return f"in_process: {self._shared_state.size} rank(s) as threads"

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Call) -> None:
        """Reduce the tensors of all ranks, in rank order. Every rank does this itself."""
        tensors = self._show(tensor, call)
        if self._size == 1:  # in place, because no other rank reads the tensor
            reduce_into(tensor, op, [tensor])
            return
        result = reduce_in_rank_order(op, tensors)
        self.barrier(call)
        tensor.copy_(result)

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction, call: Call) -> None:
        """On the root, reduce the tensors of all ranks, in rank order."""
        tensors = self._show(tensor, call)
        result = reduce_in_rank_order(op, tensors) if self._rank == root else None
        self.barrier(call)
        if result is not None:
            tensor.copy_(result)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Call) -> None:
        """Copy the root's tensor into this rank's tensor."""
        tensors = self._show(tensor, call)
        if self._rank != root:
            tensor.copy_(tensors[root])
        self.barrier(call)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: Call) -> None:
        """Copy the tensors of all ranks into this rank's block."""
        result = torch.cat(self._show(tensor, call))
        self.barrier(call)
        block.copy_(result)

    def gather(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """On the root, copy the tensors of all ranks into the root's block."""
        tensors = self._show(tensor, call)
        result = None if block is None else torch.cat(tensors)
        self.barrier(call)
        if block is not None and result is not None:
            block.copy_(result)

    def scatter(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """Copy this rank's part of the root's block into this rank's tensor."""
        part = self._show(block, call)[root].view(self._size, tensor.numel())[self._rank].clone()
        self.barrier(call)
        tensor.copy_(part)

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: Call) -> None:
        """Reduce this rank's parts of the blocks of all ranks, in rank order."""
        blocks = self._show(block, call)
        result = reduce_in_rank_order(op, [entry.view(self._size, tensor.numel())[self._rank] for entry in blocks])
        self.barrier(call)
        tensor.copy_(result)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        call: Call,
    ) -> None:
        """From the tensor of every rank, copy the part for this rank."""
        shown = self._meet(call, (tensor.detach(), list(input_counts)))
        parts = [theirs.split(counts)[self._rank] for theirs, counts in shown]
        sent = [part.numel() for part in parts]
        result = torch.cat(parts)
        self.barrier(call)
        # Compare only after the barrier: if this rank raised an error earlier, the other ranks would wait in the barrier.
        if sent != list(output_counts):
            raise DisagreementError(
                f"the other ranks send {sent} elements to rank {self._rank}, which expects {list(output_counts)}; make the "
                "input splits of the senders equal the output splits of the receiver"
            )
        output.copy_(result)

    @override
    def barrier(self, call: Call) -> None:
        self._meet(call, None)

    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        """Give the receiver a copy of the tensor."""
        self._shared_state.send(self._rank, dst, tag, tensor.detach().clone())
        return _Sent()

    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        """Begin to receive. The request copies the message into the tensor later, in `wait` or `test`."""
        return _Receiving(self._shared_state, self._rank, tensor, self._shared_state.receive(self._rank, src, tag))

    @override
    def subset(self, members: Sequence[int], name: str, number: int, scope: CancelScope) -> Transport:
        return InProcessTransport(self._shared_state.child(name, tuple(members), self._rank), members.index(self._rank))

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def abort(self) -> None:
        """Wake the other threads. Their calls then fail."""
        self._shared_state.abort()

    @property
    def _size(self) -> int:
        return self._shared_state.size

    def _show(self, tensor: torch.Tensor | None, call: Call) -> list[Any]:
        # Show only the values: results of other ranks must not become parts of the graph of a tensor that requires a gradient.
        return self._meet(call, None if tensor is None else tensor.detach())

    def _meet(self, call: Call, value: Any) -> list[Any]:
        self._round += 1
        met = self._shared_state.exchange(self._round, self._rank, (call.words, value), call.scope)
        signatures = [signature for signature, _ in met]
        if len(set(signatures)) > 1:
            raise different_calls(Statements.of(signatures))
        return [value for _, value in met]


class _Sent(Request):
    """A send that is over at once, because `SharedState.send` got a copy of the tensor."""

    def wait(self, scope: CancelScope) -> None:
        pass

    def test(self) -> bool:
        return True

    def source(self) -> int | None:
        return None


class _Receiving(Request):
    def __init__(self, shared_state: SharedState, rank: int, tensor: torch.Tensor, receive: _Receive) -> None:
        self._shared_state = shared_state
        self._rank = rank
        self._receive = receive
        self._tensor = tensor
        self._source: int | None = None

    def wait(self, scope: CancelScope) -> None:
        # The message was received by an earlier call of `wait` or `test`.
        if self._source is not None:
            return
        source, message = self._shared_state.collect(self._receive, scope)
        self._source = source
        if message.numel() != self._tensor.numel() or message.dtype != self._tensor.dtype:
            raise DisagreementError(
                f"rank {source} sent {message.numel()} elements of {message.dtype} to rank {self._rank}, which expects "
                f"{self._tensor.numel()} of {self._tensor.dtype}"
            )
        with untracked():
            self._tensor.copy_(message)

    def test(self) -> bool:
        if self._source is None and self._receive.message is not None:
            # The message is there already, so this wait does not block.
            self.wait(CancelScope(0.001))
        return self._source is not None

    def source(self) -> int | None:
        return self._source


class InProcessReconnector(StoreReconnector):
    """Connects the ranks again after the group has lost a rank or let a new rank in. The ranks are threads of one process.

    Args:
        states: maps the number of each generation (see `Generation`) to its shared state. All ranks share this dictionary.
    """

    def __init__(self, store: Store, generation: Generation, first_size: int, states: dict[int, SharedState]) -> None:
        super().__init__(store, generation, first_size)
        self._first_size = first_size
        self._states = states

    def newcomer(self) -> InProcessReconnector:
        """Make the reconnector for a new thread that wants to join the group."""
        me = self._join_queue.take_number()
        return InProcessReconnector(self.store, Generation(WAITING, (me,), me), self._first_size, self._states)

    @override
    def has_ended(self, member: int) -> bool:
        return self.store.check([f"ended/{member}"])

    @override
    def connect(self, generation: Generation, timeout_s: float) -> Transport:
        state = self._states.setdefault(generation.number, SharedState(len(generation.members)))
        return InProcessTransport(state, generation.rank)


class InProcessGroup(ShrinkableGroup):
    """A group whose ranks are threads. A test can simulate a lost rank (`lose`), or add a rank (`newcomer`)."""

    _reconnector: InProcessReconnector

    def lose(self) -> None:
        """Make this rank look like a killed process to the other ranks, for tests. This rank must issue no more calls."""
        self._reconnector.store.set(f"ended/{self._generation.me}", b"")
        self.abort()

    def newcomer(self) -> InProcessGroup:
        """Make a group of one rank for a new thread, for tests. Any thread may call this method.

        The new group then calls `admit` to join this group.
        """
        return InProcessGroup(InProcessTransport(SharedState(1), 0), self._reconnector.newcomer(), **self._options)


def create_groups(size: int, *, name: str = "default", timeout_s: float = 60.0) -> list[InProcessGroup]:
    """Make a group of `size` ranks in this process. Return one object for each rank. Each object needs its own thread."""
    if size < 1:
        raise InvalidArgumentError(f"expected at least one rank, found {size}")
    store, states, members = InMemoryStore(), {0: SharedState(size)}, tuple(range(size))
    return [
        InProcessGroup(
            InProcessTransport(states[0], rank),
            InProcessReconnector(store, Generation(0, members, rank), size, states),
            name=name,
            timeout_s=timeout_s,
        )
        for rank in range(size)
    ]


class InProcessBackend(Backend):
    """Makes a group of one rank, for a script that was started without a launcher."""

    def missing(self) -> str | None:
        """Return None, because this backend needs no other software."""
        return None

    def connect(self, request: ConnectRequest) -> HostGroup:
        """Make a group of one rank. For more ranks as threads, use `syncline.collectives.testing.run_ranks`."""
        asked = request.world_size or (request.launch.least_world_size() if request.launch else 1)
        if asked != 1:
            raise LaunchError(
                f"backend 'in_process' connects threads of one process, but this job has {asked} processes; use backend "
                "'mpi' or 'gloo', or syncline.collectives.testing.run_ranks for ranks as threads"
            )
        if request.rank not in (None, 0):
            raise LaunchError(f"rank={request.rank} was asked for, but nothing launched this process, so it is rank 0 of 1")
        if request.init_method not in (None, "env://"):
            raise LaunchError(
                f"init_method {request.init_method!r} says where processes meet, but backend 'in_process' has only this one; "
                "leave it out, or choose backend 'gloo'"
            )
        if request.store is not None:
            raise LaunchError(
                "a store was given, but backend 'in_process' has only this process; leave it out, or choose backend 'gloo'"
            )
        return create_groups(1, name=request.group_name, timeout_s=request.timeout_s)[0]


backend = InProcessBackend()
