from __future__ import annotations

import threading

import pytest

from syncline.collectives import (
    InvalidArgumentError,
    NotInitializedError,
    ProcessGroup,
    destroy_process_group,
    exchange_objects,
    gather_object,
    init_process_group,
)
from syncline.collectives.api.object_exchange import all_gather_bytes
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bytes_of_all_lengths(size: int) -> None:
    def body(group: ProcessGroup) -> list[bytes]:
        return all_gather_bytes(b"\0x" * (5 * group.rank), group=group)

    assert run_ranks(size, body) == [[b"\0x" * (5 * rank) for rank in range(size)]] * size


def test_objects_are_copies() -> None:
    def body(group: ProcessGroup) -> None:
        mine = {"rank": group.rank}
        everyone = exchange_objects(mine, group=group)
        assert everyone == [{"rank": 0}, {"rank": 1}]
        assert everyone[group.rank] is not mine

    run_ranks(2, body)


class OnlyForRoot:
    """Objects of this class can be unpickled only in the thread whose name `reader` has."""

    reader = ""

    def __reduce__(self) -> tuple[object, ...]:
        return unpickled, ()


def unpickled() -> str:
    if threading.current_thread().name != OnlyForRoot.reader:
        raise AssertionError("only the root needs the object")
    return "unpickled"


def test_only_the_root_unpickles_what_it_gathers() -> None:
    def body(group: ProcessGroup) -> list[object] | None:
        gathered: list[object] | None = None
        if group.rank == 1:
            OnlyForRoot.reader, gathered = threading.current_thread().name, [None] * 2
        gather_object(OnlyForRoot(), gathered, group=group, group_dst=1)
        return gathered

    assert run_ranks(2, body) == [None, ["unpickled"] * 2]


def test_the_default_group_is_the_default() -> None:
    with pytest.raises(NotInitializedError):
        exchange_objects("alone")
    init_process_group()
    try:
        assert exchange_objects("alone") == ["alone"]
    finally:
        destroy_process_group()


def test_what_does_not_pickle_fails_before_anything_is_sent() -> None:
    def body(group: ProcessGroup) -> list[int]:
        with pytest.raises(Exception, match="pickle"):
            exchange_objects(lambda: None, group=group)
        return exchange_objects(group.rank, group=group)

    assert run_ranks(2, body) == [[0, 1], [0, 1]]


def test_a_rank_that_is_not_the_root_may_pass_an_empty_list() -> None:
    def body(group: ProcessGroup) -> list[object]:
        gathered: list[object] = [None] * 3 if group.rank == 1 else []
        gather_object(group.rank, gathered, group=group, group_dst=1)
        return gathered

    assert run_ranks(3, body) == [[], [0, 1, 2], []]


def test_only_the_root_passes_a_list_to_fill() -> None:
    def body(group: ProcessGroup) -> None:
        wrong, found = (None, "expected a list") if group.rank == 1 else ([None] * 2, "expected None, for it is not the root")
        with pytest.raises(InvalidArgumentError, match=found):
            gather_object(group.rank, wrong, group=group, group_dst=1)

    run_ranks(2, body)
