"""What many ranks say, in few words, and told from rank to rank."""

from __future__ import annotations

import pytest

from syncline.collectives import ProcessGroup
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.health.agreement import MessageCarrier
from syncline.collectives.health.statements import Statements, ranks_in_words, runs
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState


@pytest.mark.parametrize(
    ("ranks", "found", "words"),
    [
        ([3], [(3, 3)], "rank 3"),
        ([0, 1, 2], [(0, 2)], "ranks 0, 1, 2"),
        ([0, 1, 2, 3], [(0, 3)], "ranks 0-3"),
        ([0, 1, 3, 5, 6, 7, 8, 9], [(0, 1), (3, 3), (5, 9)], "ranks 0, 1, 3, 5-9"),
        ([rank for rank in range(10_000) if rank != 17], [(0, 16), (18, 9999)], "ranks 0-16, 18-9999"),
    ],
)
def test_ranks_in_words(ranks: list[int], found: list[tuple[int, int]], words: str) -> None:
    assert runs(ranks) == found
    assert ranks_in_words(ranks) == words


def test_ranks_that_say_the_same_are_named_together() -> None:
    assert Statements.of(["b", "a", "b", "b", "b", "b", "c"]).in_words() == "ranks 0, 2-5: b; rank 1: a; rank 6: c"


def test_many_different_texts_are_told_of_most_ranks() -> None:
    """What is told has a bound, and nobody is forgotten."""
    statements = Statements.of(["all_reduce"] * 10_000)
    for other in range(20):
        statements.add(f"call {other}", [10_000 + other])
    packed = statements.packed()
    assert len(packed) < 500
    told = Statements()
    told.add("mine", [20_000])
    told.add_packed(packed)
    assert told.heard == {*range(10_020), 20_000}
    assert sorted(map(len, told.ranks.values())) == [1] * 8 + [10_000]
    assert told.untold == set(range(10_007, 10_020))
    assert told.in_words().endswith("ranks 10007-10019: something else; rank 20000: mine")


def test_the_first_that_is_heard_of_a_rank_counts() -> None:
    said = Statements.of(["a", "b"])
    said.add("c", [1, 2])
    said.add_packed(Statements.of(["d", "d", "d", "d"]).packed())
    assert said.ranks == {"a": [0], "b": [1], "c": [2], "d": [3]}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_hears_every_other(size: int) -> None:
    shared_state = SharedState(size)

    def body(outer: ProcessGroup) -> None:
        carrier = MessageCarrier(InProcessTransport(shared_state, outer.rank), outer.rank, size)
        said = carrier.statements("odd \u2260 even" if outer.rank % 2 else "even", CancelScope(10))
        expected = {"even": list(range(0, size, 2)), "odd \u2260 even": list(range(1, size, 2))}
        assert {text: sorted(ranks) for text, ranks in said.ranks.items()} == expected

    run_ranks(size, body)


def test_all_texts_are_told_where_that_is_asked_for() -> None:
    size = 24  # on 12 hosts; in an error message at most 8 different texts are told
    shared_state = SharedState(size)

    def body(outer: ProcessGroup) -> None:
        carrier = MessageCarrier(InProcessTransport(shared_state, outer.rank), outer.rank, size)
        told = carrier.statements(f"host {outer.rank // 2 * 2}", CancelScope(10), most_told=None)
        assert {text: sorted(ranks) for text, ranks in told.ranks.items()} == {
            f"host {rank}": [rank, rank + 1] for rank in range(0, size, 2)
        }

    run_ranks(size, body)


def test_a_rank_that_does_not_come_is_named() -> None:
    shared_state = SharedState(2)

    def body(outer: ProcessGroup) -> None:
        if outer.rank == 0:
            with pytest.raises(TimeoutError, match="rank 1 did not come"):
                MessageCarrier(InProcessTransport(shared_state, 0), 0, 2).statements("here", CancelScope(0.2))
        outer.barrier()

    run_ranks(2, body)
