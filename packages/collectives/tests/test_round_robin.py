"""Groups in turn; that they overlap is tested under MPI."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from syncline.collectives import RoundRobinGroup
from syncline.collectives.backends.in_process import backend as in_process
from syncline.collectives.startup.backend import ConnectRequest


def test_each_collective_goes_to_the_next_group() -> None:
    groups = [in_process.connect(ConnectRequest(None, None, None, None, 5.0)) for _ in range(3)]
    turns: list[tuple[int, str]] = []

    def note(number: int, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        turns.append((number, method.__name__))
        return method(*arguments, **options)

    for number, group in enumerate(groups):
        for method in (group.all_reduce, group.broadcast):
            setattr(group, method.__name__, partial(note, number, method))
    in_turn = RoundRobinGroup(groups)
    for _ in range(2):
        in_turn.all_reduce(torch.ones(2))
        in_turn.broadcast(torch.ones(2), 0)
    in_turn.all_reduce(torch.ones(2), async_op=True).wait()
    assert turns == [(0, "all_reduce"), (1, "broadcast"), (2, "all_reduce"), (0, "broadcast"), (1, "all_reduce")]
    in_turn.close()
