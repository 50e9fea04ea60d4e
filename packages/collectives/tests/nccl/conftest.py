"""What all tests of NCCL groups share."""

from __future__ import annotations

import pytest

from syncline.collectives.transports.nccl import group


@pytest.fixture(autouse=True)
def impatient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tests leave a rank behind that another waits for when it closes its group."""
    monkeypatch.setattr(group, "_CLOSE_S", 0.5)
