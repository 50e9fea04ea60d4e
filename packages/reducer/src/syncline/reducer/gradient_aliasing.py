"""Large gradients in the bucket's memory, instead of copies of what was reduced there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from .torch_internals import CAN_COUNT_STORAGE_USERS, storage_users

# Below it, aliasing a gradient takes about as long as copying it (measured: 10 us, and 10 GB/s).
LEAST_ALIASED_BYTES = 256 << 10


class GradientAliasing:
    """Lets the large gradients of a bucket use the bucket's memory between two backwards.

    Note [Aliased gradients]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    To copy what was reduced back to the parameters takes about as long as to reduce it. The bucket needs its memory again only
    when the next backward fills it; by then most gradients are gone (`zero_grad`). So at the end of backward
    `gradient.data = alias` moves a gradient into the bucket's memory: the object stays, with its version and its hooks, and the
    memory that autograd had allocated is freed. The rule:

    - Moved is a gradient of which nobody but the gradient itself uses the memory (no view, no array, no storage in Python).
      All others are copied.
    - When the bucket is filled again, a gradient that was moved and is still its parameter's is where it belongs: nothing is
      copied.
    - If the memory of one that was moved is used in any other way (the gradient is in a list, say), the bucket uses other
      memory for this backward, in which it takes longer to reduce: other ranks do not share it.

    Each rank decides for itself. Only on CPUs.

    Args:
        parameters: the bucket's.
        views: of the bucket's memory, one for each.
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
        """Whether the bucket may fill its memory: what was moved is gone, or still the gradient of its parameter."""
        return all(
            storage_users(alias) == self._alone[position]
            or self._is_elsewhere(position)
            or self._is_moved(position, self._parameters[position].grad)
            for position, alias in self._aliases.items()
        )

    def in_place(self, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        """The positions of gradients that lie in the bucket's memory."""
        return [position for position in self._aliases if self._is_moved(position, gradients[position])]

    def move(self, gradients: Sequence[torch.Tensor | None], untouched: Collection[int]) -> set[int]:
        """Move gradients into the bucket's memory, where the reduced ones are, but for those at `untouched` positions.

        Returns:
            The positions of those that lie in the bucket now, so that nothing is to be copied.
        """
        moved = set()
        for position in self._aliases:
            gradient = gradients[position]
            if gradient is None or position in untouched:
                continue
            if not self._is_moved(position, gradient):
                if not _may_move(gradient, self._views[position]):
                    continue
                if self._is_elsewhere(position):
                    self._make_alias(position)
                gradient.data = self._aliases[position]
            moved.add(position)
        return moved

    def move_out(self) -> None:
        """Give gradients that lie in the bucket's memory memory of their own, except where somebody else uses it, too."""
        for position, alias in self._aliases.items():
            gradient = self._parameters[position].grad
            if gradient is None or not self._is_moved(position, gradient) or self._is_elsewhere(position):
                continue
            python_users, users = self._alone[position]
            if storage_users(alias) == (python_users, users + 1):
                with torch.inference_mode(False):
                    gradient.data = alias.clone()

    def _make_alias(self, position: int) -> None:
        """The same memory as the view's, in a storage of its own, whose users can be counted."""
        with torch.inference_mode(False):
            alias: torch.Tensor = torch.from_dlpack(self._views[position])  # type: ignore[attr-defined]  # it is there
        self._aliases[position] = alias
        self._alone[position] = storage_users(alias)

    def _is_elsewhere(self, position: int) -> bool:
        """Whether somebody has given the alias other memory (`share_memory_` does that to a gradient's storage)."""
        return self._aliases[position].data_ptr() != self._views[position].data_ptr()

    def _is_moved(self, position: int, gradient: torch.Tensor | None) -> bool:
        view = self._views[position]
        return (
            gradient is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == view.data_ptr()
            and gradient.stride() == view.stride()
            and gradient.dtype is view.dtype
        )


def _may_move(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether nobody sees a difference but in time and place."""
    return (
        type(gradient) is torch.Tensor
        and not gradient.requires_grad
        and not gradient.is_inference()
        and gradient.layout is torch.strided
        and gradient.stride() == view.stride()
        and gradient.dtype is view.dtype
        and gradient.untyped_storage().resizable()  # it is torch's own
        and not gradient.is_shared()  # type: ignore[no-untyped-call]  # torch's
        and storage_users(gradient) == _ALONE
    )


def _users_of_one_tensor() -> tuple[int, int]:
    with torch.inference_mode(False):
        return storage_users(torch.zeros(1, device="cpu"))


_ALONE = _users_of_one_tensor() if CAN_COUNT_STORAGE_USERS else (0, 0)
