"""The ranks of a group wait for one another in a store, and say there which processes they are."""

from __future__ import annotations

from collections.abc import Mapping

from ..contract.deadline import Deadline
from ..errors import StoreTimeout
from ..failures.process_identity import ProcessIdentity, own_identity
from ..stores import Store

_SLICE_S = 0.25


def meet(store: Store, rank: int, size: int, deadline: Deadline) -> Mapping[int, ProcessIdentity]:
    """Return when all ranks have come: which process each is, as far as the system of each tells.

    Cost: one request, one for each other rank, and some while it waits.

    Args:
        store: of these ranks alone, for this meeting alone.
        rank: this one.
        size: how many there are.
        deadline: for all of it.

    Raises:
        TimeoutError: not all came; it says which did not.
        StoreError: the store failed.
    """
    mine = own_identity()
    store.set(_key(rank), "" if mine is None else mine.to_text())
    keys = [_key(other) for other in range(size)]
    while not _have_come(store, keys, deadline):
        if deadline.expired():
            absent = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(f"rank(s) {', '.join(absent) or 'that came late'} did not come to the rendezvous")
    said = [ProcessIdentity.parse(store.get(key, _SLICE_S).decode()) for key in keys]
    return {other: process for other, process in enumerate(said) if process is not None}


def _have_come(store: Store, keys: list[str], deadline: Deadline) -> bool:
    try:
        store.wait(keys, min(max(deadline.remaining_s(), 1e-3), _SLICE_S))
    except StoreTimeout:
        return False
    return True


def _key(rank: int) -> str:
    return f"met/{rank}"
