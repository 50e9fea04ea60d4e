"""Which reducers average the same parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableMapping, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

_lock = threading.Lock()
_claims_on: MutableMapping[torch.nn.Parameter, list[weakref.ref[Claim]]] = WeakIdKeyDictionary()


class Claim:
    """That somebody averages these parameters, until it is given up or forgotten.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._others: weakref.WeakSet[Claim] = weakref.WeakSet()
        self._is_given_up = False
        with _lock:
            for parameter in parameters:
                before = [claim for claim in map(_dereferenced, _claims_on.get(parameter, ())) if claim is not None]
                for claim in before:
                    if claim is not self and not claim._is_given_up:
                        claim._others.add(self)
                        self._others.add(claim)
                _claims_on[parameter] = [weakref.ref(claim) for claim in (*before, self)]

    @property
    def is_shared(self) -> bool:
        """Whether somebody else averages any of the parameters, too."""
        return len(self._others) > 0

    def give_up(self) -> None:
        """It is averaged no more."""
        with _lock:
            self._is_given_up = True
            for claim in list(self._others):
                claim._others.discard(self)
            self._others.clear()


def _dereferenced(reference: weakref.ref[Claim]) -> Claim | None:
    return reference()
