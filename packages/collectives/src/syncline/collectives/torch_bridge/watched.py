"""Show collectives to torch's tools, and let traced programs call them.

Note [What tools see]
~~~~~~~~~~~~~~~~~~~~~
A "dispatch mode", such as `CommDebugMode`, `make_fx` or `FakeTensorMode`, watches torch's operators. torch calls Syncline's
groups without an operator, so while a mode is active, a call takes more steps:

1. `issue` calls torch's functional operator for the call, such as `_c10d_functional.all_reduce`. Modes see this operator, and
   may record it.
2. The operator calls the same method of the group again, with the modes switched off, on a new tensor. So the ranks make the
   same calls, whether a tool watches on all ranks, on some, or on none.
3. The thread that waits for the call's work copies the result to the caller's tensor.

With a `FakeTensorMode`, a call ends after step 1. Some collectives, such as `gather`, have no functional operator.
These collectives run with the modes switched off, and a tracer gets an error.

Without an active mode, calls skip these steps, because the steps cost more than a small collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from ..errors import InvalidArgumentError, MisuseError
from ..group import ProcessGroup
from ..tensors import checks
from ..tensors.checks import resolved
from ..tensors.layout import writing
from ..torch_internals import group_named, is_traced, jit_trace, modes_switched_off
from ..work import AnyFuture, FinishedWork, TensorsFuture, Work


class Seen(NamedTuple):
    """The arguments with which a dispatch mode of torch sees a call of a collective.

    Attributes:
        operator: the functional operator's name.
        inputs: the tensors that the call reads.
        outputs: the tensors that the call overwrites, one for each input.
        words: the operator's arguments between the tensors and the group's name. If one of these arguments is None, no mode
            sees the call.
        gathers: the required ratio of an output's size to its input's size; None: not checked.
        scatters: the required ratio of an input's size to its output's size; None: not checked.
    """

    operator: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    words: tuple[object, ...] = ()
    gathers: int | None = None
    scatters: int | None = None


class _Here(threading.local):
    """The works that groups have issued since `issue` called an operator on this thread; None outside of such a call."""

    issued: list[Work] | None = None


_here = _Here()


def note_issued(work: Work) -> None:
    """If `issue` is calling an operator on this thread, remember a work that a group has issued. Otherwise do nothing."""
    if _here.issued is not None:
        _here.issued.append(work)


def issue(group: Any, title: str, seen: Seen | None, issue_unseen: Callable[[], Work]) -> Work:
    """Issue a call while a dispatch mode of torch or a tracer is active; see Note [What tools see].

    Args:
        group: the `TorchProcessGroup`.
        title: the collective's name in messages.
        seen: the form in which a tool can see the call; None if torch has no operator for the call.
        issue_unseen: issues the call without an operator.

    Raises:
        InvalidArgumentError: an output has the wrong size.
        MisuseError: a tracer would leave the collective out.
    """
    name = group.getGroupName()
    if seen is not None and jit_trace() is None and None not in seen.words and _is_known(name, group):
        return _issue_seen(group.syncline_group, title, name, seen)
    if is_traced():
        raise MisuseError(
            f"{title} on {group.syncline_group.place()} cannot be recorded by a tracer, whose program would leave it out; "
            "call it outside of what is traced. make_fx records all_reduce, broadcast, all_gather_into_tensor, "
            "reduce_scatter_tensor and all_to_all_single"
        )
    with modes_switched_off():
        return issue_unseen()


def _is_known(name: str, group: object) -> bool:
    try:
        # torch knows the names of groups that it made itself.
        return group_named(name) is group
    except (RuntimeError, LookupError):
        return False


def _issue_seen(group: ProcessGroup, title: str, name: str, seen: Seen) -> Work:
    inputs, outputs = resolved(seen.inputs), resolved(seen.outputs)
    if seen.gathers or seen.scatters:
        _check_sizes(group, title, inputs, outputs, seen)
        inputs = [tensor.reshape(-1) for tensor in inputs]  # flat, because the operators divide or multiply the first dimension
    issued: list[Work] = []
    _here.issued = issued
    try:
        with torch.no_grad():
            results = _called(seen.operator, [tensor.contiguous() for tensor in inputs], (*seen.words, name))
    finally:
        _here.issued = None
    # Under a mode whose tensors have no values, such as `FakeTensorMode`, the operator has issued nothing.
    return SeenWork(issued[0] if issued else FinishedWork(outputs), outputs, results)


def _check_sizes(group: ProcessGroup, title: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], seen: Seen) -> None:
    """Raise an error if an output has the wrong size. torch could silently repeat the operator's result to fill the output."""
    for tensor, output in zip(inputs, outputs, strict=True):
        large, small, what = (output, tensor, "output") if seen.gathers else (tensor, output, "input")
        problem = checks.not_times(large, small, seen.gathers or seen.scatters or 1, what)
        if problem is not None:
            raise InvalidArgumentError(f"{title} on {group.place()}: {problem}")


def _called(operator: str, inputs: list[torch.Tensor], words: tuple[object, ...]) -> list[torch.Tensor]:
    call = getattr(torch.ops._c10d_functional, operator)
    if operator.endswith("_coalesced"):
        return list(call(inputs, *words))
    (tensor,) = inputs
    return [call(tensor, *words)]


class SeenWork(Work):
    """The work of a call that went through an operator of torch. `wait` copies the results to the caller's tensors.

    Args:
        issued: the work of Syncline's group; a finished work if the operator issued nothing.
        outputs: the caller's tensors.
        results: the tensors that the operator returned.
    """

    def __init__(self, issued: Work, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        self._issued = issued
        self._outputs = outputs
        self._results = results
        self._lock = threading.Lock()  # because the thread that completes the future may copy at the same time

    @override
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        self._issued.wait(timeout)
        self._deliver()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective is over. `wait` may still have to copy the collective's result."""
        return self._issued.is_completed()

    def exception(self) -> BaseException | None:
        """Return the error of the collective, or None."""
        return self._issued.exception()

    @override
    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> TensorsFuture:
        """Return a future that completes when the results are copied."""

        def deliver(done: AnyFuture) -> list[torch.Tensor]:
            done.value()
            self._deliver()
            return self._outputs

        return self._issued.get_future().then(deliver)

    def _deliver(self) -> None:
        with self._lock:
            results, self._results = self._results, []
            for result, output in zip(results, self._outputs, strict=False):  # empty if another thread has copied
                # `wait_tensor` lets a tracer record the wait, and lets the operators release the work.
                there = torch.ops._c10d_functional.wait_tensor(result).view(output.shape)
                with writing(output):
                    output.copy_(there)
