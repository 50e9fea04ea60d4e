"""How survivors meet again over MPI, with communicators that only play MPI's part."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("mpi4py")

from syncline.collectives import TransportError
from syncline.collectives.membership.reconnector import MOST_ATTEMPTS
from syncline.collectives.membership.shrinkable_group import ShrinkableGroup
from syncline.collectives.transports.mpi import library
from syncline.collectives.transports.mpi import reconnector as module
from syncline.collectives.transports.mpi.reconnector import MPIReconnector

PATIENCE_S = 20.0


class Communicator:
    """The n-th shrink of the job's. Who agrees says what it was told, as if all others had said true."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.told: list[int] = []
        self.is_free = False

    def Free(self) -> None:  # noqa: N802 - MPI's name
        self.is_free = True

    def Get_group(self) -> MagicMock:  # noqa: N802 - MPI's name
        return MagicMock(Get_rank=lambda: 0)

    def Shrink(self) -> Communicator:  # noqa: N802 - MPI's name
        return Communicator(self.number + 1)

    def Agree(self, flag: int) -> int:  # noqa: N802 - MPI's name
        self.told.append(flag)
        return flag


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "revoke", lambda communicators: None)
    monkeypatch.setattr(module, "MPI", MagicMock(Intracomm=lambda made: made, Exception=RuntimeError))
    monkeypatch.setattr(module, "translated", lambda members, job: [0, 2])


class Connecting:
    """Makes transports; raises these errors first, one after the other, once the first generation is connected."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.over: list[Any] = []

    def __call__(self, communicator: Any, members: Any) -> Any:
        self.over.append(communicator)
        if len(self.over) > 1 and self.errors:
            raise self.errors.pop(0)
        return MagicMock(name=f"transport over {communicator.number}")


def a_reconnector(connect: Connecting) -> MPIReconnector:
    return MPIReconnector(Communicator(), connect, MagicMock(), "default")  # type: ignore[arg-type]


def test_whatever_keeps_a_rank_from_connecting_the_others_are_told() -> None:
    connect = Connecting(OSError("no memory to share"))
    reconnector = a_reconnector(connect)
    reconnector.shrink(PATIENCE_S)
    assert [(over.number, over.told) for over in connect.over] == [(0, []), (1, [0]), (2, [1])]
    assert reconnector.generation.number == 2


def test_a_group_that_is_closed_gives_its_communicator_back() -> None:
    reconnector = a_reconnector(Connecting())
    group = ShrinkableGroup(
        MagicMock(liveness=None, compares_every_call=True, closes_together=False), reconnector, timeout_s=1.0
    )
    group.close()
    assert reconnector._communicator.is_free  # type: ignore[attr-defined]


def test_members_that_never_connect_are_told_why() -> None:
    reconnector = a_reconnector(Connecting(*(OSError(f"no memory to share, {number}") for number in range(MOST_ATTEMPTS + 1))))
    words = r"the ranks \[0, 2\] of the job live, and could not connect: no memory to share, 3"
    with pytest.raises(TransportError, match=words):
        reconnector.shrink(PATIENCE_S)


def test_a_second_shrink_goes_on_where_the_first_has_failed() -> None:
    connect = Connecting(*(OSError("no memory to share") for _ in range(MOST_ATTEMPTS + 1)))
    reconnector = a_reconnector(connect)
    with pytest.raises(TransportError):
        reconnector.shrink(PATIENCE_S)
    reconnector.shrink(PATIENCE_S)
    assert [over.number for over in connect.over] == list(range(len(connect.over))), "no communicator is shrunk twice"


def test_who_connected_in_vain_gives_its_transport_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [0, 1]  # another rank could not connect at first
    monkeypatch.setattr(Communicator, "Agree", lambda self, flag: answers.pop(0))
    reconnector = a_reconnector(connect := Connecting())
    made: list[Any] = []
    monkeypatch.setattr(reconnector, "_connect", lambda *given: made.append(connect(*given)) or made[-1])
    assert reconnector.shrink(PATIENCE_S) is made[1]
    made[0].abort.assert_called_once_with()
    made[1].abort.assert_not_called()


def test_who_fails_to_connect_revokes_what_the_others_wait_in(monkeypatch: pytest.MonkeyPatch) -> None:
    revoked: list[Any] = []
    monkeypatch.setattr(library, "revoke", revoked.extend)
    with library.revoked_on_failure("of all", "of the node"):  # type: ignore[arg-type]
        pass
    assert revoked == []
    with pytest.raises(OSError, match="no memory"), library.revoked_on_failure("of all", "of the node"):  # type: ignore[arg-type]
        raise OSError("no memory to share")
    assert revoked == ["of all", "of the node"]
