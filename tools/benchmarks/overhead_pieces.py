"""Where the reducer's cost for each parameter goes: what it asks of torch, each piece timed alone."""

from __future__ import annotations

import argparse
import operator
import timeit
from collections.abc import Callable

import torch

from syncline.collectives import ProcessGroup

from . import session
from .report import Report

NUMEL = 16
ROUNDS = 100


def measure(options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:  # noqa: ARG001 - as every part
    """A table of nanoseconds for each parameter: the least of many rounds in turns, which noise only adds to."""
    count = session.scale(options).many
    pieces = _pieces(count)
    rounds = [{name: timeit.timeit(piece, number=1) for name, piece in pieces.items()} for _ in range(ROUNDS)]
    found = {name: 1e9 * min(taken[name] for taken in rounds) / count for name in pieces}
    bare = found.pop(_BARE)
    rows = [[name, f"{nanoseconds - (bare if 'hook' in name else 0):.0f}"] for name, nanoseconds in found.items()]
    report.table("pieces", f"ns for each of {count} parameters, least of {ROUNDS} rounds", ["piece", "ns"], rows)
    report.keep("pieces", found)


_BARE = "backward without hooks"


def _pieces(count: int) -> dict[str, Callable[[], object]]:
    parameters = [torch.nn.Parameter(torch.randn(NUMEL)) for _ in range(count)]
    gradients = [torch.randn(NUMEL) for _ in range(count)]
    buffer = torch.empty(count * NUMEL)
    views = list(torch.split(buffer, NUMEL))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

    def set_views() -> None:
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

    def concatenate() -> None:
        with torch.inference_mode():
            torch.cat(gradients, out=buffer)

    def copy_back() -> None:
        with torch.inference_mode():
            torch._foreach_copy_(gradients, views)

    noted: list[int] = []
    return {
        _BARE: _backward(count, None),
        "a hook that does nothing": _backward(count, lambda _: None),
        "a hook that notes an index": _backward(count, _note(noted)),
        "reading .grad": lambda: list(map(operator.attrgetter("grad"), parameters)),
        "reading dtype and requires_grad": lambda: (
            set(map(operator.attrgetter("dtype"), gradients)),
            any(map(operator.attrgetter("requires_grad"), gradients)),
        ),
        "reading addresses": lambda: list(map(torch.Tensor.data_ptr, gradients)),
        "concatenating into the bucket": concatenate,
        "copying back": copy_back,
        "parameter.grad = view": set_views,
    }


def _note(noted: list[int]) -> Callable[[torch.Tensor], None]:
    """As the reducer's hook, which now and then does more."""
    add, wake_at = noted.append, (-1, -2)

    def note(_: torch.Tensor) -> None:
        add(0)
        if len(noted) in wake_at:
            raise AssertionError("never")

    return note


def _backward(count: int, hook: Callable[[torch.Tensor], None] | None) -> Callable[[], object]:
    parameters: list[torch.Tensor] = [torch.nn.Parameter(torch.randn(NUMEL)) for _ in range(count)]
    if hook is not None:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def run() -> None:
        torch.cat(parameters).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in parameters:
            parameter.grad = None

    return run
