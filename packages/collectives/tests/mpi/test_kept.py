"""What is remembered of places in memory."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives.backends.mpi.node import kept
from syncline.collectives.backends.mpi.node.kept import Kept, view_at


def test_the_oldest_is_forgotten_when_there_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST_WEIGHT", 4)
    places: Kept[str] = Kept()
    for place, weight in ((8, 1), (16, 2), (24, 1)):
        places.keep(place, str(place), weight)
    assert places == {8: "8", 16: "16", 24: "24"}
    places.keep(32, "32", 2)
    assert places == {24: "24", 32: "32"}
    places.keep(40, "40", 9)  # too much by itself, and yet the next call may want it
    assert places == {40: "40"}
    places.keep(48, "48")
    assert places == {48: "48"}


def test_a_view_shares_the_memory() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    with torch.inference_mode():
        view = view_at(tensor.data_ptr() + 2, 4, torch.bfloat16)
    assert view.tolist() == [1, 2, 3, 4]
    assert not view.is_inference()
    view.mul_(2)
    assert tensor.tolist() == [[0, 2, 4], [6, 8, 5]]
