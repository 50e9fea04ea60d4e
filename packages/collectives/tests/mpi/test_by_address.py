"""What is remembered of places in memory."""

from __future__ import annotations

import torch

from syncline.collectives.backends.mpi.node import by_address
from syncline.collectives.backends.mpi.node.by_address import ByAddress, view_at


def test_each_is_made_once_and_too_many_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(by_address, "_MOST", 3)
    made: list[int] = []
    places = ByAddress(lambda address: made.append(address) or str(address))
    assert [places[address] for address in (8, 16, 8, 24, 16)] == ["8", "16", "8", "24", "16"]
    assert made == [8, 16, 24]
    assert places[32] == "32"
    assert places[8] == "8"
    assert made == [8, 16, 24, 32, 8]


def test_a_view_shares_the_memory() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    with torch.inference_mode():
        view = view_at(tensor.data_ptr() + 2, 4, torch.bfloat16)
    assert view.tolist() == [1, 2, 3, 4]
    assert not view.is_inference()
    view.mul_(2)
    assert tensor.tolist() == [[0, 2, 4], [6, 8, 5]]
