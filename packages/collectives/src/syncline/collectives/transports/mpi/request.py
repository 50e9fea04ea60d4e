"""MPIRequest: a send or receive of MPI that has been started."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import torch
from mpi4py import MPI
from typing_extensions import override

from ...engine.cancel_scope import CancelScope
from ...engine.transport import Request
from ...errors import DisagreementError
from .library import mpi_errors, wait
from .waiting import MESSAGE_NAP_S


class MPIRequest(Request):
    """A non-blocking MPI send or receive.

    Its tensor stays alive until MPI has finished, even if this object is dropped earlier.

    MPI reads or writes the tensor when the other rank comes. If a receive is given up, it is not cancelled: its message may be
    in flight, and the next receive would take this message.
    """

    _abandoned: ClassVar[deque[tuple[MPI.Request, torch.Tensor]]] = deque()

    def __init__(self, request: MPI.Request, tensor: torch.Tensor, *, receives: bool = False) -> None:
        self._request = request
        self._receives = receives
        self._tensor = tensor
        self._status = MPI.Status()
        self._over = False

    @override
    def wait(self, scope: CancelScope) -> None:
        if not self._over:
            with mpi_errors():
                wait(self._request, scope, self._status, longest_nap_s=MESSAGE_NAP_S)
            self._end()

    @override
    def test(self) -> bool:
        if not self._over:
            with mpi_errors():
                is_over = self._request.Test(self._status)
            if is_over:
                self._end()
        return self._over

    def __del__(self) -> None:
        if not self._over:
            self._abandoned.append((self._request, self._tensor))  # no MPI call, because any thread may run this at any time

    @classmethod
    def free_abandoned(cls) -> None:
        """Release the tensors of those dropped requests that are over now."""
        for _ in range(len(cls._abandoned)):
            try:
                entry = cls._abandoned.popleft()
            except IndexError:  # another thread is in this function, too
                return
            try:
                is_over = entry[0].Test()
            except MPI.Exception:
                is_over = False  # not known; MPI may still use the tensor
            # MPI may still write to this tensor, so look again at the next send or receive.
            if not is_over:
                cls._abandoned.append(entry)

    def _end(self) -> None:
        self._over = True
        # Not Get_count: in Open MPI 4 its result is a C int.
        if self._receives and (sent := self._status.Get_elements(MPI.BYTE)) != self._tensor.nbytes:
            raise DisagreementError(
                f"rank {self._status.Get_source()} sent {sent} bytes, this rank expects {self._tensor.nbytes}; make both sides "
                "pass as many elements"
            )

    @override
    def source(self) -> int | None:
        return self._status.Get_source() if self._over else None
