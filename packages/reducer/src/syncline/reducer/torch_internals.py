"""Private parts of torch that the reducer uses. The table says what happens if this version of torch lacks a part.

======================================  ==============================================================================
private to torch                        without it
======================================  ==============================================================================
``_execution_engine.queue_callback``    importing the package is an error (it calls back at the end of backward)
``BackwardCFunction.apply.__code__``    importing the package is an error (it shows whether a backward runs inside another)
``_foreach_copy_``, ``_foreach_zero_``  importing the package is an error (they copy or zero many gradients in one call)
``torch._C.Future``                     importing the package is an error (``Future.then()`` returns such an object)
``_current_graph_task_id``              a bucket whose last gradient was not expected last waits for the end of backward, and a
                                        forward within a backward with averaging is an error (checkpoints of a whole wrapper)
``_current_autograd_node``              a backward inside a hook of another backward must reach all parameters by itself
``_will_engine_execute_node``           ``find_unused_parameters=True`` is an error
``_storage_Use_Count``                  no gradient is aliased: all are copied back
``_post_accumulate_grad_hooks``         users' hooks that use a gradient before it is averaged are not found
``Tensor._version``                     an optimizer's step in such a hook is found only if the hook drops the gradient
``in_compiled_autograd_region``         compiled autograd gives no error, but the reduction of its first backward never ends
hooks on gradients left undefined       a second hook on each parameter, which costs half a microsecond; after a change of
                                        dtype, a gradient that is left undefined is an error (torch 2.6 and 2.7)
======================================  ==============================================================================
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Variable
from torch.torch_version import TorchVersion

GraphNode = torch.autograd.graph.Node

try:
    _queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
    # The Python entry of every torch.autograd.Function's backward. If it is on the stack, the code runs inside such a backward.
    _FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
    foreach_copy = torch._foreach_copy_
    foreach_zero = torch._foreach_zero_
    FutureBase = torch._C.Future
except AttributeError as error:
    raise ImportError(f"syncline-reducer does not work with torch {torch.__version__}: {error}") from error

#: Whether hooks on a parameter also run when backward leaves the parameter's gradient undefined. torch has no function that
#: says this, so the version decides.
TELLS_OF_UNDEFINED_GRADIENTS = TorchVersion(torch.__version__) >= "2.8"
CAN_COUNT_STORAGE_USERS = hasattr(torch._C, "_storage_Use_Count")
CAN_FORESEE_NODES = hasattr(torch._C, "_will_engine_execute_node")
_current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_current_graph_task_id: Callable[[], int] = getattr(
    torch._C, "_current_graph_task_id", itertools.count(start=-2, step=-1).__next__
)


def current_backward() -> int:
    """Return the number of the backward on this thread. An inner backward has its own number.

    The numbers start at 0. Without a backward on this thread, the result is -1. If this version of torch does not number its
    backwards, each call returns a new number below -1.
    """
    return _current_graph_task_id()


def runs_backward() -> bool:
    """Whether a backward runs on this thread. False if this version of torch does not number its backwards."""
    return current_backward() >= 0


def accumulation_node(parameter: torch.nn.Parameter) -> GraphNode:
    """Return the node of autograd's graph that accumulates the parameter's gradient.

    A caller that hooks the node must keep a reference to the node. Otherwise autograd makes a new node. A change of dtype or
    device also gives the parameter another node.
    """
    # A parameter of a subclass of Tensor may wrap the results of torch's functions, and so hide its node.
    with torch.inference_mode(False), hookable(parameter), torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def hook_undefined_gradients(parameter: torch.nn.Parameter, note: Callable[[], object]) -> Any:
    """Call `note` when backward reaches the parameter and leaves its gradient undefined.

    The caller must keep a reference to the returned handle.
    """
    node = accumulation_node(parameter)

    def look(_: object, gradients: tuple[torch.Tensor | None, ...]) -> None:
        if gradients[0] is None:
            note()

    return _HeldHook(node, node.register_hook(look))


def hook_defined_gradients(parameter: torch.nn.Parameter, note: Callable[[], object]) -> Any:
    """Call `note` before backward adds a gradient to `parameter.grad`.

    The caller must keep a reference to the returned handle.
    """
    node = accumulation_node(parameter)

    def look(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            note()

    return _HeldHook(node, node.register_prehook(look))


class _HeldHook:
    """A handle of a hook on a node. The handle keeps the node alive."""

    def __init__(self, node: GraphNode, handle: Any) -> None:
        self.node = node
        self.remove = handle.remove


@contextmanager
def hookable(*parameters: torch.nn.Parameter) -> Iterator[None]:
    """A context in which frozen parameters accept hooks. If torch refuses to unfreeze a parameter, all are frozen again."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def unreached(nodes: Sequence[GraphNode]) -> list[int]:
    """Return the positions of the nodes that the running backward will not execute.

    Nodes of the inner backward of a re-entrant checkpoint count as unreached. Cost: 0.1 to 0.2 microseconds for each node.
    """
    will_execute = torch._C._will_engine_execute_node
    if all(map(will_execute, nodes)):  # the usual case, in half the time
        return []
    return [position for position, node in enumerate(nodes) if not will_execute(node)]


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs the backward."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # not loaded if no code uses it
    return bool(getattr(module, "in_compiled_autograd_region", False))


def hooks_after_accumulation(parameter: torch.nn.Parameter) -> Collection[object]:
    """Return all post-accumulate-grad hooks on a parameter, including the reducer's own hooks."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return () if hooks is None else hooks.values()


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that increases at each in-place change of the tensor, or 0 if torch has no `_version`."""
    return getattr(tensor, "_version", 0)


def storage_users(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the number of Python references to a tensor's storage, and the number of all its users."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


def enclosing_function() -> Any:
    """Return the `torch.autograd.Function` whose backward contains the current backward, or None.

    Cost: 0.2 microseconds, to read the Python stack.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _FUNCTION_BACKWARD:
            return frame.f_locals["self"]
    return None


def call_at_backward_end(callback: Callable[[], None]) -> None:
    """Call `callback` when the outermost backward has computed all gradients. Call this function while a backward runs.

    Note [The outermost backward]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A re-entrant checkpoint runs an inner backward inside the backward of its node. Autograd can call a callback only at the end
    of the inner backward, when the outer backward still runs. So in an inner backward, this function hooks the node that runs
    the inner backward. When this node has finished, the function calls itself. In the outermost backward, the function
    registers the callback.
    """
    node = enclosing_function()
    if node is None:
        try:
            _queue_callback(callback)
        except RuntimeError:
            if not in_compiled_autograd():  # compiled autograd drops the callback; in torch 2.6 it raises instead
                raise
        return

    _call_at_end_around(node, callback)


def call_at_outer_end(callback: Callable[[], None]) -> bool:
    """If a hook of an outer backward runs the backward that ends now, call `callback` at the end of the outer backward.

    Call this function in a callback of `call_at_backward_end`. Return whether there is such an outer backward.
    """
    # No node of the backward that ends is running any more. If a node is running, it belongs to an outer backward.
    node = _current_node()
    if node is not None:
        _call_at_end_around(node, callback)
    return node is not None


def _call_at_end_around(node: Any, callback: Callable[[], None]) -> None:
    def after_node(*_: Any) -> None:
        handle.remove()
        call_at_backward_end(callback)

    handle = node.register_hook(after_node)
