"""Keep large gradients in the bucket's memory after the reduction, to save a copy."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from .torch_internals import CAN_COUNT_STORAGE_USERS, storage_users

# For smaller gradients a copy is as fast as aliasing (measured: 10 us for an alias, 10 GB/s for a copy).
LEAST_ALIASED_BYTES = 256 << 10


class GradientAliasing:
    """Keeps the large gradients of a bucket in the bucket's memory between two backwards. Works only on the CPU.

    Note [Aliased gradients]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    A copy of the reduced gradients from the bucket takes about as long as their reduction. So at the end of backward,
    `gradient.data = alias` moves a gradient into the bucket's memory. The bucket needs this memory again only in the next
    backward, and `zero_grad` usually drops the gradients before.

    - A gradient is moved only if no view, no array and no storage object in Python uses its memory. All other gradients are
      copied.
    - When the bucket is filled again, a moved gradient that is still its parameter's gradient is not copied.
    - If other code uses the memory of a moved gradient (for example, a list holds the gradient), the bucket uses other memory
      for this backward. The reduction is then slower, because the other memory is not shared with other ranks.

    Each rank decides by itself which gradients it moves.

    Args:
        parameters: the bucket's parameters.
        views: views of the bucket's memory, one for each parameter.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._views = views
        self._aliases: dict[int, torch.Tensor] = {}
        self._alone: dict[int, tuple[int, int]] = {}
        if CAN_COUNT_STORAGE_USERS and views[0].is_cpu:
            for position, view in enumerate(views):
                if view.nbytes >= LEAST_ALIASED_BYTES:
                    self._make_alias(position)

    def is_memory_free(self) -> bool:
        """Whether the bucket may overwrite its memory.

        True if each gradient that was moved into this memory is gone, has other memory now, or is still the `grad` of its
        parameter.
        """
        return all(
            storage_users(alias) == self._alone[position]
            or self._is_elsewhere(position)
            or self._is_moved(position, self._parameters[position].grad)
            for position, alias in self._aliases.items()
        )

    def in_place(self, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        """Return the positions of the gradients that are in the bucket's memory."""
        return [position for position in self._aliases if self._is_moved(position, gradients[position])]

    def move(self, gradients: Sequence[torch.Tensor | None], untouched: Collection[int]) -> set[int]:
        """Make gradients use the bucket's memory as their data. So they get the reduced values in this memory without a copy.

        The method skips small gradients, gradients at `untouched` positions, and gradients that may not move (see `_may_move`).

        Returns:
            The positions of the gradients that are now in the bucket's memory.
        """
        moved = set()
        for position in self._aliases:
            gradient = gradients[position]
            if gradient is None or position in untouched:
                continue
            if not self._is_moved(position, gradient):
                if not _may_move(gradient, self._views[position]):
                    continue
                # `share_memory_` has moved the alias itself, so the alias no longer shows the bucket's memory.
                if self._is_elsewhere(position):
                    self._make_alias(position)
                gradient.data = self._aliases[position]
            moved.add(position)
        return moved

    def move_out(self) -> None:
        """Move gradients out of the bucket's memory into new memory. A gradient whose memory other code uses is not moved."""
        for position, alias in self._aliases.items():
            gradient = self._parameters[position].grad
            # This parameter's gradient is not in the bucket's memory.
            if gradient is None or not self._is_moved(position, gradient) or self._is_elsewhere(position):
                continue
            python_users, users = self._alone[position]
            # The gradient is the only user besides the alias, so no other code sees the move.
            if storage_users(alias) == (python_users, users + 1):
                with torch.inference_mode(False):
                    gradient.data = alias.clone()

    def _make_alias(self, position: int) -> None:
        # A tensor with a storage of its own, so that the users of this storage can be counted.
        with torch.inference_mode(False):
            alias: torch.Tensor = torch.from_dlpack(self._views[position])  # type: ignore[attr-defined]  # it is there
        self._aliases[position] = alias
        self._alone[position] = storage_users(alias)

    def _is_elsewhere(self, position: int) -> bool:
        # `share_memory_` gives a gradient's storage other memory.
        return self._aliases[position].data_ptr() != self._views[position].data_ptr()

    def _is_moved(self, position: int, gradient: torch.Tensor | None) -> bool:
        view = self._views[position]
        return (
            gradient is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == view.data_ptr()
            and gradient.stride() == view.stride()
            and gradient.dtype is view.dtype
            and not gradient.is_conj()
            and not gradient.is_neg()
        )


def _may_move(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether this gradient may move into a bucket's memory: the user would see no change except the gradient's address."""
    return (
        type(gradient) is torch.Tensor
        and not gradient.requires_grad
        and not gradient.is_inference()
        and gradient.layout is torch.strided
        and gradient.shape == view.shape
        and gradient.stride() == view.stride()
        and gradient.dtype is view.dtype
        and not gradient.is_conj()
        and not gradient.is_neg()
        and gradient.untyped_storage().resizable()  # torch itself has allocated this storage
        and not gradient.is_shared()  # type: ignore[no-untyped-call]  # torch's
        and storage_users(gradient) == _ALONE
    )


def _users_of_one_tensor() -> tuple[int, int]:
    with torch.inference_mode(False):
        return storage_users(torch.zeros(1, device="cpu"))


_ALONE = _users_of_one_tensor() if CAN_COUNT_STORAGE_USERS else (0, 0)
