"""One of our process groups seen as one of torch.distributed's."""

# Each method takes what several overloads of torch's take, and has its older name beside the newer one.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..api.monitored_barrier import monitored_barrier
from ..engine.cancel_scope import seconds
from ..group import ProcessGroup
from ..torch_internals import disable_dynamo
from .backend_shim import TorchBackendShim, UnservedDeviceError
from .options import time_limit_s
from .torch_collectives import TorchCollectives
from .torch_exchanges import TorchExchanges

_NO_TIME = timedelta(milliseconds=1)


class TorchProcessGroup(TorchCollectives, TorchExchanges):
    """Hands every call to the group of ours underneath, `syncline_group`, with the options in our words.

    Note [A group that torch can hold]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    * torch's Python functions call these methods by their names here. C++ (the reducer of torch's DDP, functional
      collectives) calls some of them through pybind: those of `all_reduce`, `broadcast`, the gathers and scatters of lists and
      of coalesced tensors, `all_to_all_single`, `send`, `recv` and `barrier`; no other is reached from there.
    * Some have two names, as torch renamed them: `all_gather_single` was `_allgather_base`, and so on.
    * C++ keeps only its half of the object. torch's table of groups keeps this half, until the group is destroyed.
    * The base class keeps a group's name in its C++ backends, of which there are none here; hence `getGroupName` and the like,
      the names that C++ looks for.
    * `asyncOp` (absent from old versions) says that nobody will see the work: then the call ends when the collective has.
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
        self._is_shared = is_shared  # the script's: it ends it
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
        """A group of some ranks of this one; None on the others. Only the new group's members need call it."""
        if self.rank() not in new_ranks:
            return None
        limit_s = time_limit_s(timeout) or time_limit_s(getattr(opts, "_timeout", None))
        name = group_name or f"{self._group_name}/{','.join(map(str, new_ranks))}"
        part = self.syncline_group.subset(list(new_ranks), name, timeout_s=limit_s)
        made = TorchProcessGroup(part, dist.PrefixStore(f"{name}/", self._store), self._backend_name)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or "undefined")
        return made

    # ---- what torch asks a group ----

    @disable_dynamo
    def name(self) -> str:
        """The name under which the script has asked for the backend."""
        return self._asked_as

    _get_backend_name = name

    @disable_dynamo
    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks for
        """The name under which the backend is registered. C++ would look for the group of its own of any other name."""
        return self._backend_name

    def go_by(self, name: str) -> None:
        """Answer to another name: `syncline run` gives a script this group for its "gloo"."""
        self._asked_as = name

    @disable_dynamo
    def getGroupName(self) -> str:  # noqa: N802 - the name that C++ looks for
        """Torch's name for this group, unique among the groups of a job."""
        return self._group_name

    @disable_dynamo
    def setGroupName(self, name: str) -> None:  # noqa: N802 - the name that C++ looks for
        """Torch's name for this group."""
        self._group_name = name

    @disable_dynamo
    def getGroupDesc(self) -> str:  # noqa: N802 - the name that C++ looks for
        """What its maker said of it."""
        return self._group_description

    @disable_dynamo
    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - the name that C++ looks for
        """What its maker says of it."""
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
        """Where the ranks of this group may meet."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective may take from now on."""
        self.syncline_group.set_timeout(seconds(timeout))

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: our groups count from 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has issued on this group: where ranks differ, one has left out a call."""
        return self._collectives_issued

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 names the ranks that are missing. torch calls it on groups that go by "gloo".

        A limit of zero means to torch that there is no time to wait at all.
        """
        is_zero = timeout is not None and not timeout
        monitored_barrier(self.syncline_group, _NO_TIME if is_zero else timeout, wait_all_ranks)

    # ---- the end ----

    def shutdown(self) -> None:
        """Finish what was issued and close. All ranks call it; `destroy_process_group` does.

        While an exception is on its way through, nothing is waited for, as the other ranks may not come.
        """
        if sys.exc_info()[0] is not None:
            self.abort()
            return
        try:
            if not self._is_shared:
                self.syncline_group.close()
        finally:
            self._closed()

    def abort(self) -> None:
        """Give up without waiting for anything in flight."""
        self.syncline_group.abort()
        self._closed()

    def _closed(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
