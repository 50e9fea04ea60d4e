"""The ranks of a group wait for one another in a store, and say there which processes they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..engine.cancel_scope import CancelScope
from ..errors import StoreTimeout
from ..health.process_identity import ProcessIdentity, own_identity
from ..stores import Store

_SLICE_S = 0.25
_ALL = "all came"


def meet(store: Store, rank: int, size: int, scope: CancelScope) -> Mapping[int, ProcessIdentity]:
    """Return when all ranks have come: which processes the ranks of this node are, as far as the system tells.

    Nobody can look after a process of another node, so nobody asks which it is.

    Cost for L ranks on this node: L + 6 requests of fixed size, however many ranks there are, and some while it waits. Only if
    not all come, some for each rank that did not: see `_absent`.

    Args:
        store: of these ranks alone, for this meeting alone.
        rank: this one.
        size: how many there are.
        scope: for all of it.

    Raises:
        TimeoutError: not all came; it says which did not.
        StoreError: the store failed.
    """
    mine = own_identity()
    node = None if mine is None else f"node/{mine.node}"
    if mine is not None:
        place = store.add(f"{node}/count", 1)
        store.set(f"{node}/{place}", f"{rank} {mine.to_text()}")
    store.set(_key(rank), "")
    if store.add("came", 1) == size:
        store.set(_ALL, "")
    while not _have_come(store, scope):
        if scope.is_over():
            absent = _absent(store, range(size))
            raise TimeoutError(f"rank(s) {', '.join(map(str, absent)) or 'that came late'} did not come to the rendezvous")
    return {} if node is None else _on_node(store, node)


def _absent(store: Store, ranks: Sequence[int]) -> list[int]:
    """Which of these ranks have not come. Cost: about 2 (1 + log2(n / m)) requests for each of m that have not, of n."""
    if store.check([_key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return _absent(store, ranks[:middle]) + _absent(store, ranks[middle:])


def _have_come(store: Store, scope: CancelScope) -> bool:
    try:
        store.wait([_ALL], min(max(scope.remaining_s(), 1e-3), _SLICE_S))
    except StoreTimeout:
        return False
    return True


def _on_node(store: Store, node: str) -> dict[int, ProcessIdentity]:
    found: dict[int, ProcessIdentity] = {}
    for place in range(1, store.add(f"{node}/count", 0) + 1):
        rank, _, text = store.get(f"{node}/{place}", _SLICE_S).decode().partition(" ")
        process = ProcessIdentity.parse(text)
        if process is not None:
            found[int(rank)] = process
    return found


def _key(rank: int) -> str:
    return f"met/{rank}"
