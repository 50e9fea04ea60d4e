"""How the survivors of a Gloo group meet again: in the store in which they met at first, if that is still there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from typing_extensions import override

from ..contract.deadline import Deadline
from ..errors import StoreError
from ..failures.process_identity import ProcessIdentity, has_ended, own_identity
from ..host.transport import Transport
from ..startup.backend import ConnectRequest
from ..stores import AsTorchStore, FromTorchStore, PrefixStore, Store
from ..stores.polling import poll
from ..stores.store import as_keys, key_timeout
from ..survivors.reunion import Generation
from ..survivors.store_reunion import StoreReunion

Connect = Callable[[Generation, dist.Store, float], Transport]

_REMEDY = "let the ranks meet in a folder (init_method='file:///shared/folder') or start them with torchrun"


def store_lack(request: ConnectRequest, size: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why the store in which the ranks meet would not outlive each of them; None if it would. A pure function.

    A store that the caller gave is taken for one that does.
    """
    if size == 1 or request.store is not None:
        return None
    if request.init_method is not None and request.init_method.startswith("file:"):
        return None
    is_env = request.init_method is None or request.init_method.startswith("env:")
    if is_env and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return f"the ranks of this Gloo group met in a store that rank 0 serves, and that would end with it; {_REMEDY}"


class GlooReunion(StoreReunion):
    """Members are processes; each leaves in the store who it is, so that those on its machine know when it has ended.

    Args:
        store: where the first generation met.
        generation: of the group as it is.
        connect: connects `(generation, store, timeout_s)` by Gloo; the store is good for no longer than that.
        lack: why the members cannot meet again, or None.
    """

    def __init__(self, store: dist.Store, generation: Generation, connect: Connect, lack: str | None = None) -> None:
        super().__init__(FromTorchStore(store), generation)
        self._connect = connect
        self._lack = lack
        self._processes: dict[int, ProcessIdentity | None] = {}
        if lack is None:
            mine = own_identity()
            self.store.set(f"process/{generation.me}", "" if mine is None else mine.to_text())

    @override
    def missing(self) -> str | None:
        return self._lack

    @override
    def has_ended(self, member: int) -> bool:
        if member not in self._processes:
            key = f"process/{member}"
            if not self.store.check([key]):
                return False  # it has not come so far, or was killed on the way
            self._processes[member] = ProcessIdentity.parse(self.store.get(key).decode())
        return has_ended(self._processes[member])

    @override
    def connect(self, generation: Generation, timeout_s: float) -> Transport:
        watched = AsTorchStore(_WatchedStore(self._keys(generation), lambda: self._ended(generation), timeout_s))
        transport = self._connect(generation, watched, timeout_s)
        watched.release()  # after a failure a thread of Gloo's may still ask it
        return transport

    def _ended(self, generation: Generation) -> list[int]:
        return [member for member in generation.members if self.has_ended(member)]


class _WatchedStore(PrefixStore):
    """A store in which nobody waits for a member that has ended."""

    def __init__(self, store: Store, ended: Callable[[], Sequence[int]], timeout_s: float) -> None:
        super().__init__("gloo", store, timeout_s)
        self._ended = ended

    @override
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        self.wait([key], timeout)
        return super().get(key, timeout)

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        timeout_s, names = self._limit_s(timeout), as_keys(keys)

        def is_over() -> bool:
            ended = [] if self.check(names) else self._ended()
            if ended:
                raise StoreError(f"{self.describe()}: member(s) {json.dumps(list(ended))} ended before all had connected")
            return self.check(names)

        if not poll(is_over, Deadline(timeout_s)):
            raise key_timeout(names, self.describe(), timeout_s)
