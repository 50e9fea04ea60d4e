"""One backend for each type of device: "cpu:mpi,cuda:nccl"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..engine.composed import PerDeviceGroup
from ..errors import InvalidArgumentError
from ..group import ProcessGroup
from .backend import Backend, ConnectRequest


class PerDeviceBackend(Backend):
    """Connects one backend for each type of device.

    Args:
        backends: for each device type ("cpu", "cuda") its backend.
    """

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = dict(backends)

    def missing(self) -> str | None:
        """The first problem of any of the backends."""
        lacks = (backend.missing() for backend in self._backends.values())
        return next((lack for lack in lacks if lack is not None), None)

    @property
    def meets_in_store(self) -> bool:
        """Whether any of the backends meets in a store."""
        return any(backend.meets_in_store for backend in self._backends.values())

    def connect(self, request: ConnectRequest) -> PerDeviceGroup:
        """Connect one backend after the other. The CPU's backend comes first, because the others may meet over it.

        Only backends that meet in a store get the request's store. Each backend gets its device type, so it need not prepare
        for others.
        """
        groups: dict[str, ProcessGroup] = {}
        for device in sorted(self._backends, key=lambda device: device != "cpu"):
            backend = self._backends[device]
            # If no backend meets in a store, all of them get it, so that they refuse what they would ignore.
            store = request.store if backend.meets_in_store or not self.meets_in_store else None
            groups[device] = backend.connect(
                replace(request, store=store, host_group=groups.get("cpu"), devices=frozenset({device}))
            )
        return PerDeviceGroup({device: groups[device] for device in self._backends})


def parse(specification: str) -> dict[str, str]:
    """Parse "cpu:mpi,cuda:nccl" to {"cpu": "mpi", "cuda": "nccl"}.

    Raises:
        InvalidArgumentError: the text has another form, or names a device twice.
    """
    pairs = [entry.split(":") for entry in specification.replace(" ", "").split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        raise InvalidArgumentError(
            f"expected devices and backends such as 'cpu:mpi,cuda:nccl', each device once, found {specification!r}"
        )
    return dict(pairs)
