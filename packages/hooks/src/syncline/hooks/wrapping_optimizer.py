"""The base class of optimizers that step another optimizer, and communicate."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from syncline.collectives import MisuseError


class WrappingOptimizer(torch.optim.Optimizer):
    """An optimizer that wraps another optimizer, and shows the wrapped optimizer's parameter groups, state and defaults.

    Hooks of `register_step_pre_hook` and `register_step_post_hook` run around the whole step, including communication. Hooks
    for `state_dict` and `load_state_dict` are hooks of the wrapped optimizer.

    Args:
        optim: the wrapped optimizer.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim
        # `super().__init__` would make new groups. `super().__setstate__`, with which torch unpickles an optimizer, makes all
        # else that an optimizer needs: the tables of hooks, and a `step` that calls hooks.
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in torch
        """The wrapped optimizer's parameter groups. After a state is loaded, the groups are a new list."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in torch
        """The wrapped optimizer's state."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute in torch
        """The wrapped optimizer's defaults."""
        return self.optim.defaults

    def __getstate__(self) -> dict[str, Any]:
        """Refuse `pickle` and `copy.deepcopy`: the group and the parameters belong to this process.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            f"a {type(self).__name__} cannot be copied or pickled: make one like this, and load its state_dict() into that"
        )

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call the wrapped optimizer's method of this name."""
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call the wrapped optimizer's method of this name."""
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call the wrapped optimizer's method of this name."""
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """Call the wrapped optimizer's method of this name."""
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the wrapped optimizer's `zero_grad`."""
        self.optim.zero_grad(set_to_none=set_to_none)
