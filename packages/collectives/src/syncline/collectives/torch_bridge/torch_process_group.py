"""TorchProcessGroup wraps a Syncline `ProcessGroup`, so that torch.distributed can use the group."""

# Methods accept the arguments of several overloads of torch, and some also have torch's older name. mypy refuses both.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engine.cancel_scope import seconds
from ..errors import InvalidArgumentError
from ..group import ProcessGroup
from ..torch_internals import disable_dynamo
from .call_issuer import time_limit_s
from .torch_collectives import TorchCollectives


class UnservedDeviceError(InvalidArgumentError, RuntimeError):
    """torch asks for a device that the group does not serve. The class is also a RuntimeError, because torch expects one."""


class TorchBackendShim:
    """The object that torch gets when it asks a Syncline group for the backend of a device. The group carries out all calls."""

    supports_splitting = True
    supports_coalescing = False  # torch's word for NCCL's group calls
    supports_time_estimate = False

    def __init__(self, group: TorchProcessGroup) -> None:
        self._group = group

    def name(self) -> str:
        """Return the name under which the backend is registered."""
        return self._group.name()

    def rank(self) -> int:
        """Return this process's rank."""
        return self._group.rank()

    def size(self) -> int:
        """Return the number of ranks."""
        return self._group.size()

    @property
    def options(self) -> Options:
        """The options that a new group inherits when torch splits this group."""
        return Options(self.name(), timedelta(seconds=self._group.syncline_group.timeout_s))

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: torch lets a single rank call `allocate_tensor`, but Syncline's `allocate` needs all ranks."""
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: the ranks are connected already."""

    def perform_nocolor_split(self, device: torch.device | None) -> None:
        """Do nothing. When torch splits a group, torch calls this method on a rank that joins none of the new groups."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the group counts its collectives from 0 on every rank."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of the group's collectives."""
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort the group without waiting for calls in flight."""
        self._group.abort()

    def shutdown(self) -> None:
        """Finish all calls and close the group."""
        self._group.shutdown()


class Options:
    """The options of a group: its time limit, and the name of its backend."""

    def __init__(self, backend: str, timeout: timedelta) -> None:
        # The result is not used, but `seconds` raises an error if the limit is impossible.
        seconds(timeout)
        self.backend = backend
        self._timeout = timeout

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return copy.copy(self)


class TorchProcessGroup(TorchCollectives):
    """A group of torch.distributed that translates torch's options, and passes every call to `syncline_group`.

    Note [A group that torch can hold]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    * torch's Python functions call these methods by name. C++ (the reducer of torch's DDP, functional collectives) reaches only
      some of them: `all_reduce`, `broadcast`, `all_to_all_single`, `send`, `recv`, `barrier`, and the gathers and scatters that
      take lists or coalesced tensors.
    * Some methods have two names, because torch renamed them: `all_gather_single` was `_allgather_base`, and so on.
    * C++ keeps only the C++ half of this object alive. torch's table of groups keeps the Python half alive, until the group is
      destroyed.
    * torch's base class would store the group's name in C++ backends, which Syncline's groups do not have. So this class has
      methods such as `getGroupName`.
    * If the option `asyncOp` is false, torch does not wait for the work. So the call returns only when the collective has
      finished.
    """

    def __init__(
        self,
        ours: ProcessGroup,
        store: dist.Store,
        backend_name: str,
        *,
        on_close: Callable[[], None] | None = None,
        is_shared: bool = False,
    ):
        super().__init__(ours, backend_name)
        self._asked_as = backend_name
        self._store = store
        self._on_close = on_close
        self.is_shared = is_shared  # the script owns the group, and closes it
        self._group_name = ""
        self._group_description = "undefined"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self._group_name}' of {self.syncline_group!r}>"

    # ---- other groups ----

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> TorchProcessGroup | None:
        """Make a group of some ranks of this group. Other ranks may call this method, too, and get None."""
        if self.rank() not in new_ranks:
            return None
        limit_s = time_limit_s(timeout) or time_limit_s(getattr(opts, "_timeout", None))
        name = group_name or f"{self._group_name}/{','.join(map(str, new_ranks))}"
        part = self.syncline_group.subset(list(new_ranks), name, timeout_s=limit_s)
        made = TorchProcessGroup(part, dist.PrefixStore(f"{name}/", self._store), self._backend_name)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or "undefined")
        return made

    # ---- torch's questions to a group ----

    @disable_dynamo
    def name(self) -> str:
        """Return the name of the backend that the script has asked for."""
        return self._asked_as

    _get_backend_name = name

    @disable_dynamo
    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks for
        """Return the name under which the backend is registered; never "gloo", for which C++ expects torch's Gloo group."""
        return self._backend_name

    def go_by(self, name: str) -> None:
        """Set the name that the method `name` returns. `syncline run` passes the name that the script has asked for."""
        self._asked_as = name

    @disable_dynamo
    def getGroupName(self) -> str:  # noqa: N802 - the name that C++ looks for
        """Return the name that torch gave this group. The name is unique among the groups of a job."""
        return self._group_name

    @disable_dynamo
    def setGroupName(self, name: str) -> None:  # noqa: N802 - the name that C++ looks for
        """Set torch's name for this group."""
        self._group_name = name

    @disable_dynamo
    def getGroupDesc(self) -> str:  # noqa: N802 - the name that C++ looks for
        """Return the description of this group."""
        return self._group_description

    @disable_dynamo
    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - the name that C++ looks for
        """Set the description of this group."""
        self._group_description = desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in sorted(self.syncline_group.device_types)]

    def _get_backend(self, device: torch.device | str) -> TorchBackendShim:
        kind = torch.device(device).type
        if kind not in self.syncline_group.device_types:
            served = ", ".join(sorted(self.syncline_group.device_types))
            raise UnservedDeviceError(f"backend '{self._backend_name}' serves tensors on {served}, not on {kind}")
        return TorchBackendShim(self)

    def get_group_store(self) -> dist.Store:
        """Return the store that torch gave this group. All ranks of the group can read and write the store."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of collectives from now on."""
        self.syncline_group.set_timeout(seconds(timeout))

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the group counts its collectives from 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has issued. If ranks have different numbers, a rank has left out a call."""
        return self._collectives_issued

    # ---- the end ----

    def shutdown(self) -> None:
        """Finish all calls and close the group. All ranks call this method, through `destroy_process_group`.

        While the program handles an exception, this method aborts the group instead: other ranks may never call `shutdown`.
        """
        if sys.exc_info()[0] is not None:
            self.abort()
            return
        try:
            if not self.is_shared:
                self.syncline_group.close()
        finally:
            self._closed()

    def abort(self) -> None:
        """Abort the group without waiting for calls in flight."""
        self.syncline_group.abort()
        self._closed()

    def _closed(self) -> None:
        # Call `on_close` only once, because `abort` may follow `shutdown`.
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
