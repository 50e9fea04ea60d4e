"""Collectives that a tool of torch's watches: what it sees of them, and what a traced program calls in their place.

Note [What tools see]
~~~~~~~~~~~~~~~~~~~~~
A tool that watches torch's operators is a "dispatch mode", such as `CommDebugMode`, `DebugMode`, `make_fx` or `FakeTensorMode`.
torch calls our groups without an operator, so a mode would not see them. While one is active, a call goes a longer way:

1. `issue` calls torch's functional operator for it, such as `_c10d_functional.all_reduce`, which the modes see and may record.
2. The operator, in C++, calls the same method of our group again, with the modes switched off, on a tensor of its own. So the
   ranks make the same calls whether a tool watches on some of them, on all or on none.
3. Whoever waits copies the result to where the caller wants it.

A mode without values (a `FakeTensorMode`) ends a call at step 1. Other collectives have no functional operator: a `gather` runs
with the modes switched off, unseen, and a tracer gets an error, as its program would leave the collective out.

Calls that no mode watches do not go this way: the operator and its copies cost more than a small collective.
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
from ..tensors.layout import untracked
from ..torch_internals import group_named, is_traced, jit_trace, modes_switched_off
from ..work import AnyFuture, FinishedWork, TensorsFuture, Work


class Seen(NamedTuple):
    """How a tool sees a call.

    Attributes:
        operator: the functional operator's name.
        inputs: the tensors that the call reads.
        outputs: those that it overwrites, each the result for one input.
        words: the operator's arguments between the tensors and the group's name; None among them: it has no word for one.
        gathers: how many times as large an output is as its input: the number of ranks; None if the sizes are free.
        scatters: the same the other way round.
    """

    operator: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    words: tuple[object, ...] = ()
    gathers: int | None = None
    scatters: int | None = None


class _Here(threading.local):
    """The works that groups issued on this thread for the operator that is being called."""

    issued: list[Work] | None = None


_here = _Here()


def note_issued(work: Work) -> None:
    """A group has issued a call; perhaps an operator asked for it."""
    if _here.issued is not None:
        _here.issued.append(work)


def issue(group: Any, title: str, seen: Seen | None, issue_unseen: Callable[[], Work]) -> Work:
    """Issue a call while a mode is active; see Note [What tools see].

    Args:
        group: the `TorchProcessGroup`.
        title: what messages call the collective.
        seen: how a tool can see it, if it can.
        issue_unseen: issues it as usual.

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
    """Whether operators find the group by its name: torch knows those that it made itself."""
    try:
        return group_named(name) is group
    except (RuntimeError, LookupError):
        return False


def _issue_seen(group: ProcessGroup, title: str, name: str, seen: Seen) -> Work:
    inputs, outputs = resolved(seen.inputs), resolved(seen.outputs)
    if seen.gathers or seen.scatters:
        _check_sizes(group, title, inputs, outputs, seen)
        inputs = [tensor.reshape(-1) for tensor in inputs]  # the operators divide, and multiply, the first dimension
    issued: list[Work] = []
    _here.issued = issued
    try:
        with torch.no_grad():
            results = _called(seen.operator, [tensor.contiguous() for tensor in inputs], (*seen.words, name))
    finally:
        _here.issued = None
    return SeenWork(issued[0] if issued else FinishedWork(outputs), outputs, results)


def _check_sizes(group: ProcessGroup, title: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], seen: Seen) -> None:
    """The operator makes results of the right size; the copy into an output of another size might stretch one in silence."""
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
    """The work of a call that went through an operator, whose results are copied by whoever waits.

    Args:
        issued: the work of our group; a finished one if nobody communicates.
        outputs: the tensors of the caller.
        results: those of the operator.
    """

    def __init__(self, issued: Work, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        self._issued = issued
        self._outputs = outputs
        self._results = results
        self._lock = threading.Lock()  # the thread that completes the future copies as well

    @override
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        self._issued.wait(timeout)
        self._deliver()
        return True

    def is_completed(self) -> bool:
        """Whether the collective is over; its result may still be copied, by `wait`."""
        return self._issued.is_completed()

    def exception(self) -> BaseException | None:
        """The error of the collective, if it has one."""
        return self._issued.exception()

    @override
    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> TensorsFuture:
        """Completes when the results are copied."""

        def deliver(done: AnyFuture) -> list[torch.Tensor]:
            done.value()
            self._deliver()
            return self._outputs

        return self._issued.get_future().then(deliver)

    def _deliver(self) -> None:
        with self._lock:
            results, self._results = self._results, []
            for result, output in zip(results, self._outputs, strict=False):  # or there are none left to copy
                # A tracer records the wait, and the operators forget the work.
                there = torch.ops._c10d_functional.wait_tensor(result).view(output.shape)
                with untracked() if output.is_inference() else torch.no_grad():
                    output.copy_(there)
