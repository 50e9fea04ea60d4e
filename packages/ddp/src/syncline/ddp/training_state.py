"""The state of the training, and of a communication hook, that ranks exchange when a group changes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from syncline.collectives import RankGivenUpError, RankLostError, StoreError

from .distributed_data_parallel import DistributedDataParallel
from .elastic_sampler import ElasticSampler
from .module_state import first_of_each, put_buffer, writable


class Stateful(Protocol):
    """An object whose state can be saved and loaded, such as a learning rate scheduler or a GradScaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, for pickle."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue from a saved state."""


def can_be_saved(thing: object) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class StateLostError(RankLostError):
    """Raised if all ranks that had the state of the training are lost."""


NO_RECOVERY = (RankGivenUpError, StoreError, StateLostError)
"""After these errors, a further recovery cannot help this rank."""


def rank_with_state(progress: Sequence[int | None]) -> int:
    """Return the lowest rank that has the newest state of the training.

    All ranks call this function after a change of the group, with the same argument.

    Args:
        progress: for each rank, a number that grows with each step. None for a newcomer without a state.

    Raises:
        StateLostError: no rank has the state.
    """
    known = [number for number in progress if number is not None]
    if not known:
        raise StateLostError("all ranks that had the state of the training are lost; start it again from a checkpoint", ())
    return progress.index(max(known))


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a `state_dict` of an optimizer, and keep all dtypes.

    torch's `load_state_dict` converts most tensors of a state, also in dicts and lists, to the dtype of their parameter. An
    example is the `mu_product` of NAdam. With converted tensors, the replicas would differ after a few steps.
    """
    optimizer.load_state_dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _with_dtypes_of(state["state"][number], optimizer.state[parameter])


def _with_dtypes_of(saved: Any, loaded: Any) -> Any:
    """Return the loaded state, but with the saved tensor wherever loading has changed a tensor's dtype."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _with_dtypes_of(saved[key], loaded[key])
    elif isinstance(saved, (list, tuple)) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(loaded)(_with_dtypes_of(*pair) for pair in zip(saved, loaded, strict=True))
    return loaded


class TrainingState:
    """The state that a joining rank gets from another rank.

    The state contains the states of model, optimizers, sampler, CPU random numbers and `stateful` objects. The state also
    contains `requires_grad` of each parameter, `training` of each module, and gradients that are accumulated for a later
    `optimizer.step()`. Optimizers and `stateful` objects have the same order on all ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        sampler: ElasticSampler,
        stateful: Sequence[Stateful] = (),
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._sampler = sampler
        self._stateful = stateful

    def outline(self) -> dict[str, str]:
        """Describe the parameters, the sampler, and the types of objects.

        A rank that loads the state must have an equal description.
        """
        sizes = {each: [len(group["params"]) for group in each.param_groups] for each in self._optimizers}
        return {
            # An error names the first difference by these words.
            **{f"'{name}'": f"{p.dtype}{list(p.shape)}" for name, p in self._model.module.named_parameters()},
            "optimizers (parameters in groups)": ", ".join(f"{type(each).__name__} {sizes[each]}" for each in self._optimizers),
            **{f"{name} of the sampler": str(value) for name, value in self._sampler.settings.items()},
            "objects in stateful": ", ".join(type(each).__name__ for each in self._stateful) or "none",
        }

    def collect(self, accumulated: Iterable[torch.nn.Parameter] = ()) -> dict[str, Any]:
        """Return this rank's state: the tensors themselves, not copies.

        `accumulated` are the parameters whose gradients are accumulated for a later `optimizer.step()`.
        """
        parameters = dict(self._model.module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        buffers = self._buffers()
        return {
            "model": self._model.module.state_dict(),
            "buffers": buffers,  # the state_dict lacks buffers that are not persistent
            "temporary": {name for name in buffers if self._is_temporary(name)},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "sampler": self._sampler.state_dict(),
            "random": torch.get_rng_state(),
            "stateful": [each.state_dict() for each in self._stateful],
            "training": {name: part.training for name, part in self._model.named_modules() if hasattr(part, "training")},
            "requires_grad": {name: parameter.requires_grad for name, parameter in parameters.items()},
            "gradients": {names[id(each)]: each.grad for each in accumulated if id(each) in names},
            "layouts": {name: each.grad.layout for name, each in parameters.items() if each.grad is not None},
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> list[torch.nn.Parameter]:
        """Give this rank the state that `collect` has returned on another rank.

        Returns:
            The parameters whose gradients are in the state.
        """
        self._make_buffers_like(state["buffers"], state["temporary"])
        module, values = self._model.module, copy.copy(state["model"])  # a shallow copy, which keeps the versions of modules
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        # torch cannot copy into expanded tensors. Write these parameters here, and all buffers below.
        expanded = {name: tensor for name, tensor in tensors if name in values and 0 in tensor.stride()}
        for name, tensor in expanded.items():
            writable([tensor])[0].copy_(values.pop(name)[first_of_each(tensor)])
        # If names are left out, torch's own check of the names would fail.
        module.load_state_dict(values, strict=not expanded)
        for name, buffer in module.named_buffers():
            writable([buffer])[0].copy_(state["buffers"][name][first_of_each(buffer)])
        for optimizer, its in zip(self._optimizers, state["optimizers"], strict=True):
            load_optimizer_state(optimizer, its)
        for each, its in zip(self._stateful, state["stateful"], strict=True):
            each.load_state_dict(its)
        self._sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state["random"])
        parts = dict(self._model.named_modules())
        for name in state["training"].keys() & parts.keys():
            # The script may have set layers to evaluation during the training.
            parts[name].training = state["training"][name]
        for name, parameter in self._model.module.named_parameters():
            # The script may have frozen or thawed parameters during the training. This rank's script has not reached this
            # point.
            parameter.requires_grad_(state["requires_grad"][name])
            parameter.grad = state["gradients"].get(name)
            # An optimizer has used this gradient already, so the script clears it, perhaps to zeros. An optimizer with momentum
            # treats zeros differently from None.
            if parameter.grad is None and name in state["layouts"]:
                parameter.grad = torch.zeros_like(parameter, layout=state["layouts"][name])
        return [each for name, each in self._model.module.named_parameters() if name in state["gradients"]]

    def _buffers(self) -> dict[str, torch.Tensor | None]:
        parts = self._model.module.named_modules()
        return {f"{path}.{key}".lstrip("."): buffer for path, part in parts for key, buffer in part._buffers.items()}

    def _is_temporary(self, name: str) -> bool:
        holder, key = self._holder(name)
        return key in holder._non_persistent_buffers_set

    def _make_buffers_like(self, buffers: dict[str, torch.Tensor | None], temporary: Collection[str]) -> None:
        """Give this rank's module the buffers that another rank's module has, but not yet their values.

        A forward may have made, enlarged, replaced or deleted buffers.
        """
        mine = self._buffers()
        for name in mine.keys() - buffers.keys():
            delattr(*self._holder(name))
        used: dict[int, torch.Tensor] = {}  # for each of the other rank's tensors, the tensor of this rank
        for name, value in buffers.items():
            own = mine.get(name)
            if value is None:
                buffer = None
            elif id(value) in used:
                buffer = used[id(value)]
            else:
                # Compare the strides, too: an expanded buffer has no memory for the values of a full buffer.
                fits = own is not None and _layout(own) == _layout(value)
                # `clone` would make a full tensor of an expanded one.
                buffer = own if fits and not any(own is other for other in used.values()) else copy.deepcopy(value.detach())
                assert buffer is not None
                used[id(value)] = buffer
            holder, key = self._holder(name)
            put_buffer(holder, key, buffer, persistent=name not in temporary)

    def _holder(self, name: str) -> tuple[torch.nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self._model.module.get_submodule(path), key


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


class HookState:
    """The state of a communication hook. Ranks can share a state if it has `state_dict` and `load_state_dict`.

    A failed step may have changed the state on some ranks only. So after a recovery all ranks take the state of one rank, but
    keep their own errors of error feedback (the parts of gradients that compression left out). Before a step is repeated, each
    rank restores the errors that it had before the step.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    @property
    def can_be_saved(self) -> bool:
        """Whether the ranks can share the state."""
        return can_be_saved(self._state)

    def collect(self) -> dict[str, Any]:
        """Return this rank's state, without the errors of error feedback."""
        return _with_errors_of({}, self._state.state_dict())

    def copy(self) -> dict[str, Any]:
        """Return a copy of this rank's state for `restore_errors`. Empty if the state cannot be saved."""
        return self._state.state_dict() if self.can_be_saved else {}

    def restore_errors(self, earlier: Mapping[str, Any]) -> None:
        """Restore the errors of error feedback from an earlier result of `copy`. Keep the rest of the hook's state."""
        if "errors" in earlier or "states" in earlier:
            self._state.load_state_dict(_with_errors_of(earlier, self._state.state_dict()))

    def load(self, state: Mapping[str, Any]) -> None:
        """Load another rank's state, but keep this rank's errors of error feedback."""
        self._state.load_state_dict(_with_errors_of(self._state.state_dict(), state))


def _with_errors_of(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the saved state `other` with the errors of the saved state `own`. The copy fits a group of any size."""
    mixed = dict(other)
    if "errors" in other:
        mixed.update(errors=own.get("errors", {}), rank=None, world_size=None)
    if "states" in other:  # a saved `ScheduleState` holds other states
        mixed["states"] = {
            name: _with_errors_of(own.get("states", {}).get(name, {}), its) for name, its in other["states"].items()
        }
    return mixed
