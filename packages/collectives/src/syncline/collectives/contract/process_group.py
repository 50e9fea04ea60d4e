"""The contract: `GroupCollectives`, `GroupExchanges`, and what a group is besides; its backends implement the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BackendUnavailableError, InvalidArgumentError
from . import checks
from .collective import Collective
from .group_collectives import GroupCollectives
from .group_exchanges import GroupExchanges
from .profiling import recorded
from .reduce_op import Reduction
from .work import Work

if TYPE_CHECKING:
    import torch.distributed as dist

DEFAULT_SILENCE_TIMEOUT_S = 30.0
"""How long survivors wait for a silent rank, in seconds, unless told otherwise."""


class ProcessGroup(GroupCollectives, GroupExchanges):
    """A set of ranks that issue the same collectives in the same order.

    **Who calls.** Every rank of the group calls every collective, with matching arguments, in the same order; only `send` and
    `recv` concern two ranks. Any thread may call; calls of one rank that are not ordered with one another (two threads without
    a lock) have no order across ranks either. Note [One total order] in `progress` says what holds for calls from a future's
    callback.

    **What comes back.** Each collective returns a `Work`. With `async_op=False` it has finished; with `async_op=True` it may be
    in flight, and the tensors belong to it until `wait()` returns.

    **How tensors are treated.** Any dtype moves; reductions are defined as `ReduceOp` says. Outputs are written in place, also
    through strides. Tensors without elements and without dimensions are as good as others. Which devices a group serves is its
    `device_types`.

    **Ranks** are those of this group, 0 to size - 1; `ranks` maps them to the ranks of the default group.

    **What any of them may raise**, beside what is listed: `InvalidArgumentError` (a tensor on a device that the group does not
    serve, a sparse tensor, an output that overlaps itself or another), `GroupClosedError`, and, from the call or from `wait()`
    if `async_op`, `CollectiveTimeout`, `TransportError`, `DisagreementError`.

    A backend implements the underscored methods, which get arguments that were checked here.

    Attributes:
        rank: this process's rank in the group.
        size: the number of ranks.
        ranks: for each rank of this group its rank in the default group.
        name: how messages call the group.
        timeout_s: how long one collective may take, in seconds.
        torch_group: the group of torch.distributed that this one stands for; None if it stands for none. It is made anew
            whenever a torch group is handed in, so this says which of them are the same.
    """

    torch_group: Any = None

    # ---- no tensor ----

    @recorded("barrier")
    def barrier(self, *, async_op: bool = False) -> Work:
        """Return on any rank only after all ranks have called it."""
        return self._barrier(async_op)

    def split(self, color: int | None, key: int | None = None, *, timeout_s: float | None = None) -> ProcessGroup | None:
        """Make new groups of the ranks that give the same color. A collective of this group.

        Args:
            color: 0 or above; None joins no group.
            key: ranks are ordered by it in the new group, then by their rank here; None keeps the order.
            timeout_s: the new group's time limit, this group's if None.

        Returns:
            The new group that this rank is in, or None without a color.
        """
        if color is not None and not (checks.is_integer(color) and 0 <= color < 2**63):
            self._refuse_if("split", f"expected a color of 0 or above (64 bits), or None, found {color!r}")
        if key is not None and not (checks.is_integer(key) and -(2**63) <= key < 2**63):
            self._refuse_if("split", f"expected a key that is an integer of 64 bits, or None, found {key!r}")
        return self._split(color, self.rank if key is None else key, self.timeout_s if timeout_s is None else timeout_s)

    def subset(self, members: Sequence[int], name: str, *, timeout_s: float | None = None) -> ProcessGroup:
        """Make a group of some ranks of this one, without the others: only the members call it, all of them alike.

        Args:
            members: ranks of this group, this rank among them; the new group has them in the order given.
            name: the new group's; at any time there is only one of that name.
            timeout_s: the new group's time limit, this group's if None.

        Raises:
            InvalidArgumentError: a rank twice or outside the group, or not this one; or the backend needs all ranks (`split`).
        """
        if (
            not checks.is_list_of_integers(members)
            or not all(0 <= rank < self.size for rank in members)
            or len(set(members)) < len(members)
            or self.rank not in members
        ):
            self._refuse_if("subset", f"expected ranks in 0..{self.size - 1}, each once, this one among them, found {members}")
        return self._subset(list(members), name, self.timeout_s if timeout_s is None else timeout_s)

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Memory from which this group communicates fastest. A collective: all ranks call it with the same arguments.

        Returns:
            A flat, uninitialised tensor of `numel` elements. The default is `torch.empty`.
        """
        self._refuse_if("allocate", checks.no_size(numel, dtype))
        return torch.empty(numel, dtype=dtype, device=device)

    # ---- what a group is: questions of those who would otherwise ask for its type ----

    @property
    def has_total_order(self) -> bool:
        """Whether what a future's callback issues has the same place among this group's collectives on every rank.

        If not, only the thread that issues the others may issue a collective that depends on one.
        """
        return True

    @property
    def can_split(self) -> bool:
        """Whether `split` makes groups; if not, whoever made this group makes its parts."""
        return True

    # ---- what it does ----

    def ran_at_once(
        self,
        name: str,  # noqa: ARG002
        op: Reduction | None,  # noqa: ARG002
        root: int | None,  # noqa: ARG002
        tensor: torch.Tensor,  # noqa: ARG002
        block: torch.Tensor | None = None,  # noqa: ARG002
    ) -> bool:
        """Run a blocking collective if there is nothing to decide and next to nothing to check; else do nothing.

        For the functional forms, which ask before they call the method: for a few bytes, the method takes as long as the ranks
        need to meet. The default says that there are no such calls. Whoever overrides one of the methods overrides this, too.

        Args:
            name: the method's: "all_reduce", "broadcast", "all_gather_into_tensor" or "reduce_scatter_tensor".
            op: the reduction, if there is one.
            root: the root, if there is one.
            tensor: this rank's.
            block: of the parts of all ranks, for the last two.

        Returns:
            Whether it was run. It may have raised what the method raises.
        """
        return False

    def algorithm_of(self, name: str, tensor: torch.Tensor) -> str | None:  # noqa: ARG002
        """The algorithm that calls of a collective on tensors like this one take on this rank.

        Of calls that differ in reduction or root, which may take others, those are told of whose kind was new last.

        Args:
            name: the method's name, such as "all_reduce".
            tensor: of the same dtype and shape.

        Returns:
            A word or two for logs, such as "window" or "MPI"; None if there was no such call, or the backend does not say.
        """
        return None

    def verify_calls(self, *, async_op: bool = False) -> Work | None:  # noqa: ARG002 - for those who can
        """Compare with the other ranks which collectives were called since the group was made. A collective.

        A group that compares each call before it runs has nothing to compare, nor has one that does not remember its calls.

        Returns:
            None if there is nothing to compare. With `async_op` a work whose `wait` raises what is listed.

        Raises:
            DisagreementError: the ranks called different collectives, and results are wrong; on all ranks.
        """
        return None

    def meeting_store(self) -> dist.Store | None:
        """The store in which the ranks of this group met, for others that want to meet; None if they met elsewhere."""
        return None

    @contextmanager
    def marked(self, mark: str) -> Iterator[None]:
        """A context in which the first call that this thread issues says more of itself than its arguments tell.

        The mark must be the same on every rank, as the rest of the call: "backward 1 since forward 12", say. Where calls are
        compared, marks are compared with them, and errors show them. A group that compares each call before it runs has the
        ranks meet once more before a call that is marked, which costs microseconds; others pay nothing.

        Only the first call: what a callback issues may run on this thread on one rank, and on another thread elsewhere.

        Args:
            mark: a few words, without a comma.
        """
        self._marks[get_ident()] = mark
        try:
            yield
        finally:
            self._marks.pop(get_ident(), None)

    def _with_mark(self, call: Collective) -> Collective:
        """The call as it is compared; see `marked`."""
        mark = self._marks.pop(get_ident(), None)
        return call if mark is None else call._replace(detail=f"{call.detail}, {mark}" if call.detail else mark)

    def end_together(self, companion: ProcessGroup) -> None:
        """Close another group of the same ranks when this one is closed, and abort it when this one is aborted.

        Groups that are made of groups, and those of torch, do nothing here: theirs end with the process.
        """

    # ---- after a loss ----

    def missing_for_shrink(self) -> str | None:
        """What keeps the survivors of this group from making a new one, with the remedy, in one sentence; None if nothing."""
        return (
            f"backend '{self.backend_name}' cannot connect the ranks that are left when one is lost; use backend 'gloo' with "
            "init_method='file:///shared/folder', or save checkpoints and let the launcher start the job again"
        )

    def shrink(self, *, silence_timeout_s: float = DEFAULT_SILENCE_TIMEOUT_S) -> ProcessGroup:
        """Make a new group of the ranks that live, after a `TransportError`. A collective of these ranks; aborts this group.

        All survivors get the same members, in the order of their ranks here, also if another rank dies meanwhile. Of this
        group, its sub-groups and its memory nothing may be used again. What the ranks were about to do is lost on some, and
        done on others: agree on that in the new group.

        Args:
            silence_timeout_s: how long to wait for a rank that does not call and is not known to have ended, in seconds.
                Then it is given up: when it comes back, its `shrink` raises `RankGivenUpError`. MPI gives up no rank that
                lives: there `shrink` fails then, and may be called again.

        Returns:
            The new group, with the name and the time limit of this one, in which ranks count from 0.

        Raises:
            BackendUnavailableError: the group cannot; see `missing_for_shrink`.
            RankGivenUpError: the others have gone on without this rank. Let it end.
            CollectiveTimeout: over MPI, a rank that lives does not call.
            StoreError: the store in which they would meet is lost.
        """
        lack = self.missing_for_shrink()
        if lack is not None:
            raise BackendUnavailableError(f"shrink on {self.place()}: {lack}")
        return self._shrink(silence_timeout_s)

    def meets_in(self, host: ProcessGroup) -> bool:  # noqa: ARG002 - for those who do
        """Whether the ranks of this group meet in that group of the host, so that `beside` can connect them again."""
        return False

    def beside(self, host: ProcessGroup) -> ProcessGroup:
        """A new group like this one, whose ranks are those of `host`, and meet there; see `meets_in`. Abort this one before."""
        raise NotImplementedError  # of a group that meets in none

    # ---- with newcomers ----

    def missing_for_admit(self) -> str | None:
        """What keeps processes that came later from joining this group, with the remedy, in one sentence; None if nothing."""
        return (
            f"backend '{self.backend_name}' cannot let processes in that come later; use backend 'gloo' with "
            "init_method='file:///shared/folder'"
        )

    @property
    def members(self) -> tuple[int, ...]:
        """For each rank a number that its process keeps in all groups that `shrink` and `admit` make of this one."""
        return tuple(range(self.size))

    @property
    def is_waiting(self) -> bool:
        """Whether this is the group of one of a process that came later, and was not let in yet."""
        return False

    def newcomers(self) -> int:
        """How many processes wait to be let in. Each rank may find another number; cost: some reads of the store."""
        return 0

    def admit(self, *, silence_timeout_s: float = DEFAULT_SILENCE_TIMEOUT_S, limit: int | None = None) -> ProcessGroup:
        """Make a new group of the members of this one and of those who wait to be let in. A collective; aborts this group.

        A process that was started with SYNCLINE_JOIN=1 begins with a group of its own (`is_waiting`), on which it calls `admit`
        to be let in. All get the same members, newcomers behind the others. A member that dies meanwhile is left out, as in
        `shrink`; whether others call `shrink` or `admit` then, they agree. Finish what was issued before; of this group, its
        sub-groups and its memory nothing may be used again.

        Args:
            silence_timeout_s: for members as in `shrink`; for a newcomer how long it waits to be let in.
            limit: let in at most so many, those first who came first; the others wait on. None lets all in.

        Returns:
            The new group, with the name and the time limit of this one.

        Raises:
            BackendUnavailableError: the group cannot; see `missing_for_admit`.
            CollectiveTimeout: nobody let this newcomer in.
            RankGivenUpError: the others have gone on without this rank. Let it end.
            RankLostError: all members that could have let this newcomer in are gone.
            StoreError: the store in which they would meet is lost.
        """
        lack = self.missing_for_admit()
        if lack is not None:
            raise BackendUnavailableError(f"admit on {self.place()}: {lack}")
        return self._admit(silence_timeout_s, limit)

    # ---- the end ----

    @abstractmethod
    def close(self) -> None:
        """Finish what was issued, then give up everything the group holds. A second call does nothing. All ranks call it."""

    @abstractmethod
    def abort(self) -> None:
        """Give up without waiting for anything in flight; waiters get a `TransportError`. One rank may call it alone."""

    # ---- what a backend implements ----

    @abstractmethod
    def _barrier(self, async_op: bool) -> Work: ...

    @abstractmethod
    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None: ...

    def _shrink(self, silence_timeout_s: float) -> ProcessGroup:
        raise NotImplementedError  # of a group for whose shrinking nothing is missing

    def _admit(self, silence_timeout_s: float, limit: int | None) -> ProcessGroup:
        raise NotImplementedError  # of a group for whose newcomers nothing is missing

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:  # noqa: ARG002 - for those who can
        raise InvalidArgumentError(
            f"subset on {self.place()}: backend '{self.backend_name}' makes groups with all ranks together only; call split "
            "on every rank"
        )
