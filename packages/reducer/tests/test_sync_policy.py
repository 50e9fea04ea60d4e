"""Which backward is reduced, as a table: no tensor, no rank."""

from __future__ import annotations

import pytest

from syncline.reducer.sync_policy import GradSyncPolicy

# Forwards that announce a reduction (F) or none (f), forwards that raise (X, x), and backwards: reduced (R) or not (-).
# What is in parentheses runs within `no_sync`, but for forwards, which say so themselves.
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
    pytest.param("FR(-)R", id="a backward that belongs to no forward, within no_sync and after it"),
    pytest.param("F(R-)R", id="one that belongs to a forward is reduced within no_sync, too"),
    pytest.param("(-)R", id="before any forward"),
    pytest.param("f(-)-FR", id="after a silent forward"),
]


@pytest.mark.parametrize("history", HISTORIES)
def test_which_backward_is_reduced(history: str) -> None:
    policy = GradSyncPolicy()
    for event in history:
        if event in "FfXx":
            policy.forward(event.isupper())
            if event in "Xx":
                policy.cancel_forward()
        elif event in "()":
            policy.keep_local(event == "(")
        else:
            assert ("R" if policy.is_due else "-") == event
            if policy.is_due:
                policy.reduced()


@pytest.mark.parametrize(
    ("events", "marks"),
    [
        pytest.param("FRFRFR", ["1 since 1", "1 since 2", "1 since 3"], id="one after the other"),
        pytest.param("RRR", ["1 since 0", "2 since 0", "3 since 0"], id="without a forward"),
        pytest.param("FRRRFR", ["1 since 1", "2 since 1", "3 since 1", "1 since 2"], id="strays"),
        pytest.param("FFFRFR", ["1 since 1", "1 since 2"], id="forwards without a backward do not count"),
        pytest.param("ffFRffFR", ["1 since 1", "1 since 2"], id="accumulation"),
        pytest.param("FXRXFR", ["1 since 1", "1 since 2"], id="forwards that raised"),
    ],
)
def test_what_ranks_compare(events: str, marks: list[str]) -> None:
    policy, found = GradSyncPolicy(), []
    for event in events:
        if event == "R":
            found.append(policy.mark)
            policy.reduced()
        else:
            policy.forward(event.isupper())
            if event == "X":
                policy.cancel_forward()
    assert found == [f"backward {mark.replace('since', 'since forward')}" for mark in marks]
