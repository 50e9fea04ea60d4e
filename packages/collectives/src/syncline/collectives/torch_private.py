"""Keeping torch.compile out of functions that it cannot look into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

# What is private here differs between versions, and the type information does not tell all of it.
eval_frame: Any = torch._C._dynamo.eval_frame

P = ParamSpec("P")
T = TypeVar("T")


def disable_dynamo(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function, and all that it calls, as Python. A decorator.

    The reducer of torch's DDP issues collectives in the middle of a compiled forward, where every new Python frame is traced;
    and a group is opaque to the tracer, which gives up with an error. `torch.compiler.disable` would do the same as this, but
    loads the whole of torch.compile (seconds) for programs that do not compile.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        tracer = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(tracer)

    _skip(call)  # what it calls is not traced without a tracer
    return call


def disable_dynamo_here(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function as Python; what it calls may be traced. A decorator that costs nothing when the function is called."""
    _skip(function)
    return function


def _skip(function: Any) -> None:
    """Do not trace the frames of this function, and do not look into it from frames that are traced."""
    function._torchdynamo_disable = True
    code = function.__code__
    if hasattr(eval_frame, "skip_code"):  # in older versions
        eval_frame.skip_code(code)
        return
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
