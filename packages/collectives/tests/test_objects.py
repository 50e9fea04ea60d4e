from __future__ import annotations

import pytest

from syncline.collectives import (
    NotInitializedError,
    ProcessGroup,
    destroy_process_group,
    exchange_objects,
    init_process_group,
)
from syncline.collectives.contract.object_exchange import all_gather_bytes
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
