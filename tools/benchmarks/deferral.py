"""DDP without overlap: a hook that keeps all buckets until the last one of the backward has come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from syncline.hooks.contract import Bucket, TensorFuture, communication_hook

from .contenders import Wrap, with_hook

Hook = Callable[[Any, Any], TensorFuture]


class Deferral:
    """The state of `deferred_hook`: the waiting buckets, and the hook that reduces them.

    Args:
        hook: reduces a bucket.
        state: the hook's state.
    """

    def __init__(self, hook: Hook, state: object = None) -> None:
        self._hook = hook
        self._state = state
        self._waiting: list[tuple[Bucket, TensorFuture]] = []

    def add(self, bucket: Bucket) -> TensorFuture:
        """Keep a bucket; with the last one, reduce all of them in order."""
        future: TensorFuture = torch.futures.Future()
        self._waiting.append((bucket, future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            for kept, promised in waiting:
                self._hook(self._state, kept).add_done_callback(partial(_keep_promise, promised))
        return future


@communication_hook
def deferred_hook(deferral: Deferral, bucket: Bucket) -> TensorFuture:
    """Reduce nothing before the whole backward is computed."""
    return deferral.add(bucket)


def without_overlap(wrap: Wrap, hook: Hook) -> Wrap:
    """A DDP whose buckets `hook` reduces after backward."""
    return with_hook(wrap, lambda _: Deferral(hook), deferred_hook)


def _keep_promise(promised: TensorFuture, done: TensorFuture) -> None:
    try:
        promised.set_result(done.value())
    except Exception as error:  # noqa: BLE001 - whoever waits for the bucket shall get it
        promised.set_exception(error)  # type: ignore[arg-type]  # torch says "result: T"
