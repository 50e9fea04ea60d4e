"""The bucket of one sparse gradient."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import torch

from syncline.collectives import ProcessGroup

from . import error_messages
from .bucket import Bucket


class SparseBucket:
    """The bucket of one parameter with a sparse gradient (COO), which has different elements on each rank.

    Between backwards the bucket holds no memory. The reduced gradient, with the elements of all ranks, replaces the parameter's
    gradient. During a reduction, `buffer` is the coalesced gradient. For the other attributes, see `Bucket`; `views` is empty.
    """

    def __init__(self, index: int, parameter: torch.nn.Parameter, name: str, group: ProcessGroup) -> None:
        self.indices = [index]
        self.parameters = [parameter]
        self.views: list[torch.Tensor] = []
        self.names = [name]
        self._place = group.place()
        self.buffer = self._nothing()

    @property
    def nbytes(self) -> int:
        """The size of this rank's gradient in bytes: indices and values together."""
        return int(self.buffer.indices().nbytes + self.buffer.values().nbytes)

    def views_into(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return a list with `buffer` itself, because this bucket has a single gradient."""
        return [buffer]

    def collect(self, unused: Collection[int] = ()) -> None:  # noqa: ARG002 - a bucket's; here nothing is overwritten
        """Set `buffer` to a copy of the gradient, or to an empty gradient if there is no gradient."""
        gradient = self.parameters[0].grad
        if gradient is None:
            self.buffer = self._nothing()
            return
        parameter = self.parameters[0]
        error_messages.check_gradient(self.names[0], parameter, gradient, parameter.dtype, self._place, layout=torch.sparse_coo)
        if gradient.requires_grad:
            raise error_messages.differentiable(self.names[0])
        coalesced = gradient.detach().coalesce()
        # If the gradient is coalesced already, `coalesce` returns the gradient itself. Copy it, because the reduction would
        # overwrite the user's values.
        self.buffer = coalesced.clone() if gradient.is_coalesced() else coalesced

    def collect_nothing(self) -> None:
        """Set `buffer` to an empty gradient."""
        self.buffer = self._nothing()

    def release_gradients(self) -> None:
        """Do nothing, because no gradient is in the bucket's memory."""

    def accept(self, result: object) -> None:
        """Set `buffer` to the reduced gradient.

        Raises:
            MisuseError: a hook's result is not a tensor, or differs from the hook's input in shape, dtype, layout or device.
        """
        error = error_messages.not_the_reduced_bucket(result, self.buffer, self.names)
        if error is not None:
            raise error
        assert isinstance(result, torch.Tensor)
        self.buffer = result

    def deliver(self, untouched: Collection[int] = (), *, may_alias: bool = True) -> None:  # noqa: ARG002 - a bucket's
        """Give the parameter its reduced gradient, unless the parameter's index is in `untouched`."""
        if self.indices[0] not in untouched:
            self.parameters[0].grad = self.buffer
        self.buffer = self._nothing()

    def _nothing(self) -> torch.Tensor:
        parameter = self.parameters[0]
        # One sparse dimension, as for embeddings.
        indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        with torch.no_grad():
            empty = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)
            return empty.coalesce()


AnyBucket: TypeAlias = Bucket | SparseBucket
