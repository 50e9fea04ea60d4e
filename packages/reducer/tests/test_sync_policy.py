"""Which backward is reduced, as a table: no tensor, no rank."""

from __future__ import annotations

import pytest

from syncline.reducer.sync_policy import GradSyncPolicy

# Forwards that announce a reduction (F) or none (f), forwards that raise (X, x), and backwards: reduced (R) or not (-).
HISTORIES = [
    pytest.param("R", id="no forward at all"),
    pytest.param("FRFR", id="one after the other"),
    pytest.param("f-f-FR", id="accumulation"),
    pytest.param("FFR", id="several forwards"),
    pytest.param("FFRR", id="and as many backwards"),
    pytest.param("FRR", id="two backwards through one forward"),
    pytest.param("f--", id="two that add up"),
    pytest.param("FfR-", id="announced before a silent forward"),
    pytest.param("fFRR", id="announced after a silent forward"),
    pytest.param("Xf-", id="a forward that raised announces nothing"),
    pytest.param("fX-", id="nor does it change what was said before"),
    pytest.param("FxR", id="a silent one that raised changes nothing"),
    pytest.param("FRXf-FR", id="later too"),
]


@pytest.mark.parametrize("history", HISTORIES)
def test_which_backward_is_reduced(history: str) -> None:
    policy = GradSyncPolicy()
    for event in history:
        if event in "FfXx":
            policy.forward(event.isupper())
            if event in "Xx":
                policy.cancel_forward()
        else:
            assert ("R" if policy.is_due else "-") == event
            if policy.is_due:
                policy.reduced()
