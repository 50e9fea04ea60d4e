"""`init` and `shutdown`, the numbers of ranks and nodes, and process sets."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, NoReturn

import torch

from syncline.collectives import (
    InvalidArgumentError,
    MisuseError,
    NonMember,
    NotInitializedError,
    Placement,
    ProcessGroup,
    TransportError,
    UnevenCalls,
    destroy_process_group,
    exchange_objects,
    get_default_group,
    init_process_group,
    new_group,
    new_subgroups_by_enumeration,
    placement_of,
)
from syncline.collectives import is_initialized as has_default_group

HorovodInternalError = TransportError
"""A collective raises this error when a rank is lost. `elastic.run` catches it, and goes on with the other ranks."""


class World:
    """The group of all ranks, and the objects that belong to this group.

    Attributes:
        placement: the node on which each rank runs.
        calls: tells ranks that have called `join` which collective comes next.
        is_ours: whether `init` made the group, so that `shutdown` destroys it.
        process_sets: the added process sets.
    """

    def __init__(self, group: ProcessGroup, *, is_ours: bool) -> None:
        self.group = group
        self.placement: Placement = placement_of(group)
        self.calls = UnevenCalls(group)
        self.is_ours = is_ours
        self.process_sets: list[ProcessSet] = []


_world: World | None = None
_callbacks: list[Callable[[bool], None]] = []


def call_with_each_world(callback: Callable[[bool], None]) -> Callable[[bool], None]:
    """A decorator: call the function after each change of `world()` (in `init`, `replace_world` and `shutdown`).

    The function's argument says whether new processes may be among the ranks, as after `replace_world`. When `shutdown` calls
    the function, `world()` already raises an error, but the old group is still open.
    """
    _callbacks.append(callback)
    return callback


def world() -> World:
    """Return the present `World`.

    Raises:
        NotInitializedError: the script has not called `init`, or has called `shutdown` after `init`.
    """
    if _world is None:
        raise NotInitializedError("syncline.horovod is not initialised: call hvd.init() first (and not after hvd.shutdown())")
    return _world


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None, **options: Any) -> None:
    """Connect all ranks. Every rank calls this function. A second call does nothing.

    If Syncline already has a default group, `init` uses this group unchanged. Otherwise `init` makes a default group with
    `check_calls=True`: the ranks compare each call before it runs.

    Args:
        comm: a communicator of mpi4py, whose ranks call `init`. None: all ranks of the job.
        process_sets: process sets to add now, as in `add_process_set`. "dynamic" adds no set. `add_process_set` can add more
            sets later.
        options: further arguments of `init_process_group`, such as `init_method`.

    Raises:
        InvalidArgumentError: `comm` is a list of ranks, or two process sets have the same ranks.
    """
    global _world
    if _world is not None:
        return
    if comm is not None and isinstance(comm, Iterable) and not hasattr(comm, "Get_rank"):
        if list(comm):
            raise InvalidArgumentError(
                f"expected a communicator of mpi4py as comm, found a list of ranks ({list(comm)}); pass "
                "MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(ranks)), on these ranks only"
            )
        # An empty list means all ranks.
        comm = None
    is_ours = not has_default_group()
    if is_ours:
        # Options come last, so that a script can turn the check off.
        init_process_group(**{"communicator": comm, "check_calls": True, **options})
    _set_world(World(get_default_group(), is_ours=is_ours))
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Close the group if `init` made it, and remove all process sets. Every rank calls this function.

    Without `init`, this function does nothing.
    """
    old = _world
    if old is None:
        return
    _set_world(None)
    # If a set cannot be closed, close the other sets anyway, and raise the error at the end.
    with ExitStack() as closing:
        if old.is_ours:
            closing.callback(destroy_process_group)
        for process_set in reversed(old.process_sets):
            closing.callback(_close, process_set)


def replace_world(group: ProcessGroup) -> None:
    """From now on, use the ranks of another group. Every rank of the new group calls this function.

    All process sets are removed, because the ranks have other numbers in the new group.
    """
    old = world()
    for process_set in old.process_sets:
        process_set._invalidate()
    _set_world(World(group, is_ours=old.is_ours), has_newcomers=True)


def _set_world(made: World | None, *, has_newcomers: bool = False) -> None:
    global _world
    _world = made
    global_process_set.ranks = [] if made is None else list(range(made.group.size))
    for callback in _callbacks:
        callback(has_newcomers)


def is_initialized() -> bool:
    """Whether `init` was called. False again after `shutdown`."""
    return _world is not None


def size() -> int:
    """The number of ranks."""
    return world().group.size


def rank() -> int:
    """This process's rank."""
    return world().group.rank


def local_size() -> int:
    """The number of ranks on this node."""
    return world().placement.local_world_size


def local_rank() -> int:
    """This process's number among the ranks on its node. This is not a collective."""
    return world().placement.local_rank


def cross_size() -> int:
    """The number of nodes that have a rank with this process's `local_rank`."""
    return len(_nodes_across())


def cross_rank() -> int:
    """The number of this node among the nodes that `cross_size` counts."""
    return _nodes_across().index(world().placement.node)


def _nodes_across() -> list[int]:
    placement = world().placement
    return [node for node in range(placement.nodes) if len(placement.ranks_on_node(node)) > placement.local_rank]


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of ranks."""
    placement = world().placement
    return len({len(placement.ranks_on_node(node)) for node in range(placement.nodes)}) == 1


# ---- process sets ----


class ProcessSet:
    """A subset of the ranks, for collectives over these ranks only.

    Args:
        ranks_or_comm: a list of ranks, each once; or a communicator of mpi4py, whose ranks form the set. The set may be made
            before `init`.

    Attributes:
        process_set_id: 0 for the set of all ranks. None before the set is added, and after it is removed.
        ranks: the ranks, in ascending order. If the set is made from a communicator, the list is empty before the set is added.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self._group: ProcessGroup | NonMember | None = None
        # The ranks of this set, and of the sets that other ranks added in the same call. The lists are the same on all ranks.
        self._lists: list[tuple[int, ...]] = []
        if hasattr(ranks_or_comm, "Get_rank"):
            self.mpi_comm = ranks_or_comm
            # Before `init`, this rank has no number yet, so `add_process_set` finds the ranks.
            self.ranks: list[int] = []
            return
        try:
            self.ranks = sorted(map(operator.index, ranks_or_comm))
        except TypeError as error:
            raise InvalidArgumentError(
                f"expected a list of ranks, or a communicator of mpi4py, found {ranks_or_comm!r}"
            ) from error

    def size(self) -> int | None:
        """The number of ranks; None before the set is added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's rank in the set; None before the set is added.

        Raises:
            MisuseError: this process is not in the set.
        """
        return None if self.process_set_id is None else self.group().rank

    def included(self) -> bool:
        """Whether this process is in the set."""
        return rank() in self.ranks

    def group(self) -> ProcessGroup:
        """The set's group of `syncline.collectives`.

        Raises:
            InvalidArgumentError: the set was not added, or was removed.
            MisuseError: this process is not in the set.
        """
        # The set of all ranks always uses the group of the present world.
        if self.process_set_id == 0:
            return world().group
        if self._group is None:
            raise InvalidArgumentError(f"expected a process set that was added (hvd.add_process_set, hvd.init), found {self}")
        if isinstance(self._group, NonMember):
            raise MisuseError(self._group.error_message())
        return self._group

    def _invalidate(self) -> None:
        self.process_set_id, self._group = None, None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_next_id = 1


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a group of a process set's ranks, and return the set. Every rank calls this function, also ranks outside of the set.

    All ranks pass the same list of ranks. But ranks may pass different communicators, such as the results of one
    `MPI.Comm.Split`. Then each rank gets the set of its own communicator.

    Raises:
        InvalidArgumentError: a set with the same ranks already exists, a rank does not exist, or communicators of several ranks
            overlap.
    """
    global _next_id
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    known = {tuple(global_process_set.ranks)}.union(*(each._lists for each in world().process_sets))
    is_again = added.process_set_id is not None
    if added.mpi_comm is None:
        lists = [tuple(added.ranks)]
    else:
        if not is_again:
            # This is a collective of the communicator: each member gives its rank. `MPI.COMM_NULL` is false.
            added.ranks = sorted(added.mpi_comm.allgather(rank())) if added.mpi_comm else []
        # Other ranks may have other lists. All ranks make the groups of all lists, or all ranks raise the error.
        told = exchange_objects((tuple(added.ranks), is_again))
        lists = sorted({ranks for ranks, _ in told if ranks})
        is_again = any(again for _, again in told)
    if is_again or not known.isdisjoint(lists):
        raise InvalidArgumentError(f"expected a process set of other ranks than those that there are, found {added} again")
    added._group = new_group(added.ranks) if added.mpi_comm is None else new_subgroups_by_enumeration(lists)[0]
    added._lists = lists
    added.process_set_id, _next_id = _next_id, _next_id + 1
    world().process_sets.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and close its group. Every rank calls this function.

    Returns:
        Whether the set was removed. The set of all ranks cannot be removed.
    """
    if process_set not in world().process_sets:
        return False
    world().process_sets.remove(process_set)
    _close(process_set)
    return True


def _close(process_set: ProcessSet) -> None:
    group = process_set._group
    process_set._invalidate()
    # A rank outside of the set has no group to close.
    if not isinstance(group, ProcessGroup):
        return
    # While an exception is handled, abort: the other ranks may wait in a collective that this rank will never start.
    if sys.exc_info()[0] is None:
        group.close()
    else:
        group.abort()


# ---- what scripts ask about the build ----


def mpi_enabled() -> bool:
    """Whether the ranks communicate over MPI."""
    return "mpi" in world().group.backend_name


def gloo_enabled() -> bool:
    """Whether the ranks communicate over Gloo."""
    return "gloo" in world().group.backend_name


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI. True if the ranks use MPI."""
    return mpi_enabled()


def mpi_built() -> bool:
    """Whether mpi4py is installed."""
    return find_spec("mpi4py") is not None


def gloo_built() -> bool:
    """Whether this torch has Gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """1 if CuPy is installed, else 0. Syncline uses NCCL through CuPy."""
    return int(find_spec("cupy") is not None)


def cuda_built() -> bool:
    """Whether this torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """False, because there is no backend for ROCm."""
    return False


def ddl_built() -> bool:
    """False, because there is no backend for DDL."""
    return False


def ccl_built() -> bool:
    """False, because there is no backend for oneCCL."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:  # noqa: ARG001 - Horovod's
    """Raise an error. To record a trace, set the environment variable SYNCLINE_TRACE instead.

    Raises:
        MisuseError: in every call.
    """
    raise MisuseError(
        "start_timeline: there is no timeline of Horovod's. Wrap the model in syncline.ddp.DistributedDataParallel and set "
        "SYNCLINE_TRACE for a trace of its steps, or use torch.profiler, in which every collective appears by name"
    )


def stop_timeline() -> None:
    """Do nothing, because `start_timeline` never starts a timeline."""
