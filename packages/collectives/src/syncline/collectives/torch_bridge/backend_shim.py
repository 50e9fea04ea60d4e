"""What torch asks of the `Backend` that it expects under each device of a group."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any, Protocol

import torch

from ..engine.cancel_scope import seconds
from ..errors import InvalidArgumentError
from ..group import ProcessGroup


class UnservedDeviceError(InvalidArgumentError, RuntimeError):
    """The group does not serve a device. A RuntimeError too, which torch expects there."""


class ShimmedGroup(Protocol):
    """The group of torch's that has the answers."""

    syncline_group: ProcessGroup

    def name(self) -> str:
        """The name under which the backend is registered."""

    def rank(self) -> int:
        """This process's rank."""

    def size(self) -> int:
        """The number of ranks."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective may take."""

    def abort(self) -> None:
        """Give up."""

    def shutdown(self) -> None:
        """Close."""


class TorchBackendShim:
    """Answers torch's questions to the backend of one device: there is one group of ours for all of them."""

    supports_splitting = True
    supports_coalescing = False  # torch's word for NCCL's group calls
    supports_time_estimate = False

    def __init__(self, group: ShimmedGroup) -> None:
        self._group = group

    def name(self) -> str:
        """The name under which the backend is registered."""
        return self._group.name()

    def rank(self) -> int:
        """This process's rank."""
        return self._group.rank()

    def size(self) -> int:
        """The number of ranks."""
        return self._group.size()

    @property
    def options(self) -> Options:
        """What a split takes over from its parent."""
        return Options(self.name(), timedelta(seconds=self._group.syncline_group.timeout_s))

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` is for that device. Not so: torch lets single ranks call it, we need all."""
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Nothing to do: the ranks are connected."""

    def perform_nocolor_split(self, device: torch.device | None) -> None:
        """Nothing to do: the others need no help to split."""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: our groups count from 0 on every rank."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective may take."""
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Give up."""
        self._group.abort()

    def shutdown(self) -> None:
        """Close."""
        self._group.shutdown()


class Options:
    """The options of a group: its time limit."""

    def __init__(self, backend: str, timeout: timedelta) -> None:
        seconds(timeout)
        self.backend = backend
        self._timeout = timeout

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return copy.copy(self)
