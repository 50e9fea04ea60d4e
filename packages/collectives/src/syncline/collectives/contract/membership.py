"""Who a rank is in its group, and whether the arguments of a call fit the group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..errors import InvalidArgumentError
from . import checks
from .reserved_tags import FIRST_RESERVED, LAST_RESERVED, is_reserved


class Membership(ABC):
    """One rank of a group: the names that messages use, the attributes of `ProcessGroup`, and its checks of arguments."""

    def __init__(
        self, rank: int, size: int, *, name: str = "default", timeout_s: float, ranks: Sequence[int] | None = None
    ) -> None:
        if not 0 <= rank < size:
            raise InvalidArgumentError(f"expected a rank in 0..{size - 1} for a group of {size}, found {rank}")
        self.rank = rank
        self.size = size
        self.ranks = tuple(range(size) if ranks is None else ranks)
        self.name = name
        self.timeout_s = timeout_s
        self._marks: dict[int, str] = {}  # by thread; mostly empty. See `ProcessGroup.marked`

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}' ({self.describe()}), rank {self.rank} of {self.size}>"

    def set_timeout(self, timeout_s: float) -> None:
        """How long a collective that is issued from now on may take, in seconds."""
        self.timeout_s = timeout_s

    # ---- what a backend says of itself ----

    @property
    @abstractmethod
    def backend_name(self) -> str:
        """The name under which the registry knows the backend, such as "mpi"."""

    @property
    @abstractmethod
    def device_types(self) -> frozenset[str]:
        """The types of device whose tensors this group moves, such as {"cpu"}."""

    @abstractmethod
    def describe(self) -> str:
        """The library underneath and its version in a few words, such as "mpi: MPICH 5.0.2"."""

    @property
    def profiled_as(self) -> str | None:
        """With what the names begin under which torch's profiler shows the collectives; None if somebody else shows them."""
        return f"syncline-{self.backend_name}"

    # ---- checks of arguments ----

    def place(self) -> str:
        """Where an error happened, in words: "rank 1 of 4 in group 'default'"."""
        return f"rank {self.rank} of {self.size} in group '{self.name}'"

    def _refuse_if(self, collective: str, problem: str | None) -> None:
        if problem is not None:
            raise InvalidArgumentError(f"{collective} on {self.place()}: {problem}")

    def _check_root(self, collective: str, root: int) -> None:
        if not checks.is_integer(root) or not 0 <= root < self.size:
            self._refuse_if(collective, f"expected a root in 0..{self.size - 1}, found {root!r}")

    def _check_on_root(
        self, collective: str, what: str, tensors: Sequence[torch.Tensor] | None, like: torch.Tensor, root: int
    ) -> None:
        if self.rank == root and tensors is None:
            self._refuse_if(collective, f"this rank is the root and must pass {what}")
        if self.rank != root and tensors:
            self._refuse_if(collective, f"only the root (rank {root}) passes {what}; pass None here")
        if self.rank == root and tensors is not None:
            self._refuse_if(collective, checks.not_one_each(what.removesuffix("s"), tensors, like, self.size))

    def _check_peer(self, collective: str, peer: int | None, tag: int) -> None:
        if not checks.is_integer(tag) or tag < 0:
            self._refuse_if(collective, f"expected a tag of 0 or above, found {tag!r}")
        if is_reserved(tag):
            self._refuse_if(collective, f"the tags {FIRST_RESERVED} to {LAST_RESERVED} are for Syncline itself, found {tag}")
        if peer is None and collective == "recv":
            return
        if not checks.is_integer(peer) or peer == self.rank or not 0 <= peer < self.size:  # type: ignore[operator]
            self._refuse_if(collective, f"expected another rank in 0..{self.size - 1}, found {peer!r}")

    def _check_tensors(
        self, collective: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        served = self.device_types
        for tensor in (*reads, *writes):
            if not checks.is_plain(tensor, served):
                self._refuse_if(collective, checks.unusable(tensor, served, self.backend_name))
        for tensor in writes:
            self._refuse_if(collective, checks.unwritable(tensor))
        if len(writes) > 1:
            self._refuse_if(collective, checks.overlapping(writes))

    def _splits(self, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        return [tensor.shape[0] // self.size] * self.size if splits is None else list(splits)
