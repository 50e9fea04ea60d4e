"""SyncBatchNorm: batch normalisation over the batches of all ranks, on any device and backend."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from syncline.collectives import (
    DisagreementError,
    InvalidArgumentError,
    MisuseError,
    NonMember,
    ProcessGroup,
    exchange_objects,
)
from syncline.collectives.internal import disable_dynamo

from .batch_normalization import BatchNormalization
from .batch_statistics import BatchStatistics, gather_statistics, statistics_of, working_dtype
from .dedicated_group import dedicated_group
from .process_groups import has_default_group, resolve_group
from .torch_internals import BatchNorm, own_modules

# For each group, the layers that the group's ranks have compared. In a new group, the ranks compare their layers again.
_compared_layers: weakref.WeakKeyDictionary[ProcessGroup, weakref.WeakSet[SyncBatchNorm]] = weakref.WeakKeyDictionary()

# A layer with one of these forwards is plain batch normalisation, so conversion may replace it.
_PLAIN_FORWARDS = (BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


class SyncBatchNorm(BatchNorm):
    """Batch normalisation with the mean and the variance of the whole batch of all ranks.

    In training, forward and backward are collectives. The ranks' batches may have different sizes, and may be empty. In
    evaluation, and in a group of one rank, the layer is plain batch normalisation. In a group of several ranks, second
    derivatives are not supported.

    The layer communicates in a separate group with the same ranks. The first forward makes this group.

    Args:
        num_features: the number of channels, the second dimension of the inputs.
        eps: a number that is added to the variance.
        momentum: the weight of the newest batch in the running estimates. None: the estimates are averages over all batches.
        affine: whether the layer has a weight (and a bias).
        track_running_stats: whether the layer keeps running estimates for evaluation.
        process_group: a group of Syncline or of torch.distributed. None: the default group at each forward. If there is no
            default group, the layer is plain batch normalisation.
        device: the device of parameters and buffers.
        dtype: the dtype of parameters and buffers.
        bias: whether the layer has a bias. No effect if `affine` is False.

    Shape: (batch, channels, ...) with at least two dimensions. The output has the same shape, dtype and memory format. 16-bit
    inputs are computed in float32.

    Cost, with c channels: an all-gather of 8 * (2c + 1) bytes from each rank in forward, and an all_reduce of 16c bytes in
    backward. In the first forward over a group, the ranks also compare their layers.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        NonMember.refuse(process_group)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: ProcessGroup | dist.ProcessGroup | None = None
    ) -> torch.nn.Module:
        """Replace each batch normalisation in a module, also torch's SyncBatchNorm, by a layer of this class.

        The function `syncline.ddp.convert_sync_batchnorm` does the same. The method does not communicate.

        Args:
            module: the module, which is changed in place. The new layers take over parameters, buffers and hooks.
            process_group: the group of the new layers. None: a layer that already has a group keeps its group, and all other
                layers use the default group.

        Returns:
            The module, or the new layer if the module itself is a batch normalisation.

        Raises:
            MisuseError: a layer cannot be converted, or this rank is not in the group.
        """
        NonMember.refuse(process_group)
        replaced: dict[torch.nn.Module, torch.nn.Module] = {}
        for name, layer in module.named_modules():
            if isinstance(layer, BatchNorm):
                replaced[layer] = cls._in_place_of(layer, name, process_group)
        for parent in list(module.modules()):
            for name, child in own_modules(parent).items():
                # A layer may stand in several places; all places get the same new layer.
                if child in replaced:
                    own_modules(parent)[name] = replaced[child]
        return replaced.get(module, module)

    @classmethod
    def _in_place_of(cls, layer: BatchNorm, name: str, process_group: Any) -> SyncBatchNorm:
        problem = _not_convertible(layer)
        if problem is not None:
            raise MisuseError(f"cannot convert layer '{name}' ({type(layer).__name__}): {problem}")
        # The new layer takes over the old layer's attributes: parameters and hooks are the same objects.
        converted = cls.__new__(cls)
        converted.__dict__.update(layer.__dict__)
        converted.process_group = getattr(layer, "process_group", None) if process_group is None else process_group
        return converted

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise this rank's batch. In training, this is a collective, also for a rank with an empty batch.

        Raises:
            InvalidArgumentError: the input's shape is wrong, or there are fewer than two values per channel over all ranks.
            DisagreementError: on all ranks, in the first forward over a group, if the layers have different numbers of
                channels, or the inputs have different dtypes.
        """
        group = self._group() if self.training else None
        if group is None or group.size == 1:
            return self._normalize_alone(input)
        return self._normalize_together(input, dedicated_group(group))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise InvalidArgumentError(
                f"expected inputs of shape (batch, {self.num_features}, ...), found {tuple(input.shape)}: the layer has "
                f"{self.num_features} channels"
            )

    def _group(self) -> ProcessGroup | None:
        # Without any group there is only this process.
        if self.process_group is None and not has_default_group():
            return None
        return resolve_group(self.process_group)

    def _normalize_alone(self, inputs: torch.Tensor) -> torch.Tensor:
        dtype = working_dtype(inputs)
        tensors = [self.weight, self.bias, self.running_mean, self.running_var]
        if {tensor.dtype for tensor in tensors if tensor is not None} in ({dtype}, {inputs.dtype}, set()):
            return super().forward(inputs)
        # With `mixed_precision`, parameters and running estimates may have different dtypes. torch's layer refuses them.
        self._check_input_dim(inputs)
        weight, bias, mean, variance = (None if tensor is None else tensor.to(dtype) for tensor in tensors)
        if not self.training and mean is not None:
            return torch.nn.functional.batch_norm(inputs, mean, variance, weight, bias, training=False, eps=self.eps)
        outputs = torch.nn.functional.batch_norm(inputs, None, None, weight, bias, training=True, eps=self.eps)
        if self.training and self.track_running_stats:
            # As in torch's layer, an empty batch is counted, but has no variance.
            self._track(statistics_of(inputs.detach()) if inputs.numel() > 0 else None)
        return outputs

    @disable_dynamo  # a compiler cannot trace a collective
    def _normalize_together(self, inputs: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        self._check_input_dim(inputs)
        # Compare only once in each group, because a comparison waits for all ranks.
        if self not in _compared_layers.get(group, ()):
            self._compare_layers(inputs, group)
        statistics = gather_statistics(statistics_of(inputs.detach()), group)
        if statistics.count < 2:
            raise InvalidArgumentError(
                f"expected more than 1 value per channel over all ranks when training, found {statistics.count} in an input of "
                f"shape {tuple(inputs.shape)} on {group.place()}"
            )
        if self.track_running_stats:
            self._track(statistics)
        return BatchNormalization.apply(inputs, self.weight, self.bias, statistics, self.eps, group)  # type: ignore[no-untyped-call, no-any-return]

    def _compare_layers(self, inputs: torch.Tensor, group: ProcessGroup) -> None:
        versions = exchange_objects(f"{self.num_features} channels of {inputs.dtype}", group=group)
        for rank, version in enumerate(versions):
            if version != versions[0]:
                raise DisagreementError(
                    f"the ranks normalise different batches ({group.place()}): {versions[0]} on rank 0, {version} on rank "
                    f"{rank}. Build the same model on every rank, and let all of them run the same layers"
                )
        _compared_layers.setdefault(group, weakref.WeakSet()).add(self)

    def _track(self, statistics: BatchStatistics | None) -> None:
        # As in torch's layer, a script may have set each of the buffers to None.
        weight = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                weight = 1.0 / int(self.num_batches_tracked)
        if statistics is None:
            return
        for running, newest in ((self.running_mean, statistics.mean), (self.running_var, statistics.unbiased_variance)):
            if running is not None:
                running.lerp_(newest.to(running.dtype), weight)

    # ---- copies ----

    def __copy__(self) -> SyncBatchNorm:
        """Return a new layer that shares the parameters, buffers and group of this layer."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Copy all attributes except the group, which the copy shares with this layer."""
        memo[id(self.process_group)] = self.process_group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes, for pickle. A layer that is loaded from the pickle uses the default group of its process.

        Raises:
            MisuseError: the layer has a `process_group`.
        """
        if self.process_group is not None:
            raise MisuseError(
                "a SyncBatchNorm with a process_group cannot be pickled: only the default group is found again. Save its "
                "state_dict, or leave process_group out"
            )
        return self.__dict__


def convert_sync_batchnorm(
    module: torch.nn.Module, process_group: ProcessGroup | dist.ProcessGroup | None = None
) -> torch.nn.Module:
    """Replace each batch normalisation in a module by `SyncBatchNorm`, which normalises over the batches of all ranks.

    Layers of torch's SyncBatchNorm are replaced, too. The function does not communicate.

    Args:
        module: the module, which is changed in place. The new layers take over parameters, buffers, hooks and other attributes.
        process_group: the group of the new layers. None: a layer that already has a group keeps its group, and all other layers
            use the default group.

    Returns:
        The module, or the new layer if the module itself is a batch normalisation.

    Raises:
        MisuseError: a layer is not initialised yet (lazy), is parametrised, or has a class that overrides `forward`. Or this
            rank is not in the group.
    """
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def refuse_layers_that_see_one_rank(module: torch.nn.Module, group: ProcessGroup) -> None:
    """Raise an error if a SyncBatchNorm of torch would normalise each rank's batch separately.

    Raises:
        MisuseError: the module has such a layer, the group has several ranks, and torch.distributed is not initialised.
    """
    if group.size == 1 or (dist.is_available() and dist.is_initialized()):
        return
    names = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.SyncBatchNorm)]
    if names:
        raise MisuseError(
            f"layer '{names[0]}' is torch.nn.SyncBatchNorm ({len(names)} in all), which would see this rank's batch alone: "
            "torch.distributed is not initialised. Call syncline.ddp.convert_sync_batchnorm(model) before it is wrapped"
        )


def _not_convertible(layer: BatchNorm) -> str | None:
    if any(is_lazy(tensor) for tensor in layer.parameters()):
        return "it is not initialised yet; run one forward of the module first"
    if is_parametrized(layer):
        return "it is parametrised; remove the parametrisation, or register it after the conversion"
    if type(layer).forward not in _PLAIN_FORWARDS and not isinstance(layer, SyncBatchNorm):
        return "it has a forward of its own, which would be lost; build it on SyncBatchNorm instead"
    return None
