"""Methods as hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls the method as long as its object lives. A hook that held a reducer would keep a model from being wrapped anew."""
    assert isinstance(method, MethodType)
    reference, function = weakref.ref(method.__self__), method.__func__

    def call(*arguments: Any) -> None:
        living = reference()
        if living is not None:
            function(living, *arguments)

    return call
