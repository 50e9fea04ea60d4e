"""A CommStream has a stream of its own."""

from __future__ import annotations

import torch

from syncline.collectives.transports.nccl.streams import StreamPool


class User:
    """Whoever needs one."""


def test_no_two_users_share_a_stream() -> None:
    made: list[tuple[torch.device, int]] = []

    def make(device: torch.device) -> int:
        made.append((device, len(made)))
        return len(made) - 1

    pool = StreamPool(make)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    users = [User() for _ in range(40)]  # torch's pool has 32
    assert [pool.acquire(first, user) for user in users] == list(range(40))
    assert pool.acquire(second, users[0]) == 40
    users[7] = User()
    assert pool.acquire(first, users[7]) == 7
    assert pool.acquire(first, users[7]) == 41
    assert [device.index for device, _ in made] == [0] * 40 + [1, 0]
