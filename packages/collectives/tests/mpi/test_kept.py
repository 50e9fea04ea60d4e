"""What is remembered of places in memory."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives.backends.mpi.node import kept
from syncline.collectives.backends.mpi.node.kept import Kept, view_at


def test_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 3)
    places: Kept[str] = Kept()
    assert [places.keep(place, str(place)) for place in (8, 16, 24)] == ["8", "16", "24"]
    assert places.get(16) == "16"
    assert places.keep(32, "32") == "32"
    assert places == {32: "32"}


def test_a_view_shares_the_memory() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    with torch.inference_mode():
        view = view_at(tensor.data_ptr() + 2, 4, torch.bfloat16)
    assert view.tolist() == [1, 2, 3, 4]
    assert not view.is_inference()
    view.mul_(2)
    assert tensor.tolist() == [[0, 2, 4], [6, 8, 5]]
