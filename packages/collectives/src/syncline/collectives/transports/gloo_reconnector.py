"""Connect the ranks of a Gloo group again, after the group has lost a rank or let a new rank in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist
from typing_extensions import override

from ..engine.transport import Transport
from ..errors import DisagreementError
from ..health.liveness import Liveness, ProcessIdentity, ProcessState, has_ended, own_identity
from ..membership.reconnector import WAITING, Generation
from ..membership.store_reconnector import JoinQueue, StoreReconnector
from ..startup.backend import ConnectRequest
from ..stores import AsTorchStore, FromTorchStore, PrefixStore

Connect = Callable[[Generation, Liveness, dist.Store, float], Transport]

_JOB = "job"
_REMEDY = "let the ranks meet in a folder (init_method='file:///shared/folder')"


def store_lack(request: ConnectRequest, size: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return an error text if the store in which the ranks meet may end when a rank ends; else None.

    A store that the caller has passed counts as a store that outlives all ranks.
    """
    if size == 1 or request.store is not None:
        return None
    if request.init_method is not None and request.init_method.startswith("file:"):
        return None
    is_env = request.init_method is None or request.init_method.startswith("env:")
    # torchrun's agent serves this store, and the agent outlives each rank.
    if is_env and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return f"the ranks of this Gloo group met in a store that rank 0 serves, and that would end with it; {_REMEDY}"


def admit_lack(request: ConnectRequest) -> str | None:
    """Return an error text if a process that starts later cannot find the ranks' store; else None."""
    if request.store is not None or (request.init_method or "").startswith("file:"):
        return None
    return (
        "a process that comes later finds the others in a folder, or in a store that it is given, and these ranks met in "
        "neither; use init_method='file:///shared/folder'"
    )


@dataclass(frozen=True)
class Job:
    """Facts about a job that a newcomer reads. A newcomer is a process that starts later and joins the job.

    Attributes:
        size: the number of ranks at the start.
        options: the options that change how the ranks communicate.
    """

    size: int
    options: Mapping[str, bool]


class GlooReconnector(StoreReconnector):
    """Connects the members of a Gloo group again. The members meet in the same store as at the start of the job.

    Args:
        store: the store, which must still exist.
        connect: connects the members by Gloo. Its arguments are `(generation, liveness, store, timeout_s)`. `connect` uses the
            store only during the call.
        lack: the reason why the members cannot meet again; None if they can.
        lack_for_newcomers: the reason why newcomers cannot join; None if they can.
    """

    def __init__(
        self,
        store: dist.Store,
        generation: Generation,
        job: Job,
        connect: Connect,
        lack: str | None = None,
        lack_for_newcomers: str | None = None,
    ) -> None:
        super().__init__(FromTorchStore(store), generation, job.size)
        self._connect = connect
        self._lack = lack
        self._lack_for_newcomers = lack_for_newcomers
        self._processes: dict[int, ProcessIdentity | None] = {}
        # If the members cannot meet again, nobody will read these keys.
        if lack is None:
            mine = own_identity()
            self.store.set(f"process/{generation.me}", "" if mine is None else mine.to_text())
            # A newcomer has read the facts from the store, so it must not write them.
            if not generation.is_waiting:
                self.store.set(_JOB, json.dumps(asdict(job)))

    @classmethod
    def of_newcomer(cls, store: dist.Store, options: Mapping[str, bool], connect: Connect, timeout_s: float) -> GlooReconnector:
        """Make the reconnector of a process that wants to join a running job.

        Raises:
            StoreError: the store lacks the facts about the job.
            DisagreementError: the ranks of the job use options other than `options`.
        """
        said = json.loads(FromTorchStore(store).get(_JOB, timeout_s))
        job = Job(said["size"], said["options"])
        if job.options != options:
            raise DisagreementError(
                f"this process joins a job whose ranks were given {job.options}, and was given {dict(options)}; call "
                "init_process_group alike"
            )
        me = JoinQueue(FromTorchStore(store), job.size).take_number()
        return cls(store, Generation(WAITING, (me,), me), job, connect)

    @override
    def missing(self) -> str | None:
        return self._lack

    @override
    def missing_for_admit(self) -> str | None:
        return self._lack or self._lack_for_newcomers

    @override
    def has_ended(self, member: int) -> bool:
        return has_ended(self._process(member))

    @override
    def is_running(self, member: int) -> bool:
        process = self._process(member)
        return process is not None and process.state() is ProcessState.RUNNING

    def _process(self, member: int) -> ProcessIdentity | None:
        # A process keeps its identity, so one look into the store is enough.
        if member not in self._processes:
            key = f"process/{member}"
            if not self.store.check([key]):
                return None  # the member has not written its identity yet, or was killed first
            self._processes[member] = ProcessIdentity.parse(self.store.get(key).decode())
        return self._processes[member]

    def _liveness(self, generation: Generation) -> Liveness:
        processes = {rank: self._process(member) for rank, member in enumerate(generation.members)}
        return Liveness({rank: known for rank, known in processes.items() if known is not None}, generation.rank)

    @override
    def connect(self, generation: Generation, timeout_s: float) -> Transport:
        store = AsTorchStore(PrefixStore("gloo", self._keys(generation), timeout_s))
        transport = self._connect(generation, self._liveness(generation), store, timeout_s)
        store.release()  # only on success: after a failure, a thread of Gloo may still use the store
        return transport
