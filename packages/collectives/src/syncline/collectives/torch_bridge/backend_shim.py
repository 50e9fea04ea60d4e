"""Answers to the questions that torch asks the `Backend` of each device of a group."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any, Protocol

import torch

from ..engine.cancel_scope import seconds
from ..errors import InvalidArgumentError
from ..group import ProcessGroup


class UnservedDeviceError(InvalidArgumentError, RuntimeError):
    """The group does not serve a device. Also a RuntimeError, because torch expects one."""


class ShimmedGroup(Protocol):
    """The torch group that has the answers."""

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
    """Answers torch's questions to the backend of one device. One group of ours serves all devices."""

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
        """The options that a split inherits from its parent."""
        return Options(self.name(), timedelta(seconds=self._group.syncline_group.timeout_s))

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """False: torch lets single ranks call `allocate_tensor`, but our `allocate` needs all ranks."""
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: the ranks are connected already."""

    def perform_nocolor_split(self, device: torch.device | None) -> None:
        """Do nothing: the other ranks can split without this one."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: our groups count from 0 on every rank."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of a collective."""
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
        # Only to raise for an impossible limit.
        seconds(timeout)
        self.backend = backend
        self._timeout = timeout

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return copy.copy(self)
