"""Gradients that lie in a bucket's memory as long as the bucket does not need it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .holders import CAN_COUNT, is_nobody_elses, is_only_user_of_its_memory

# For how many backwards, at first, nothing is lent after a gradient was still there when its bucket needed the memory.
FIRST_PAUSE = 16
# So many times a pause without such a gradient, and the next one is only half as long.
CLEAN_PAUSES = 4
# Below it takes about as long to lend a gradient as to copy it (measured: 12 us, and 10 GB/s).
LEAST_LENT_BYTES = 256 << 10


class Lending:
    """Makes the memory of a bucket's large gradients those gradients, instead of copying them back.

    Note [Lent gradients]
    ~~~~~~~~~~~~~~~~~~~~~
    To copy what was reduced back to the parameters takes about as long as to reduce it. But mostly nobody needs both, for the
    gradients of one backward are gone (`zero_grad`) when the next one fills the bucket. So at the end of backward a parameter
    gets a tensor in the bucket's memory for its gradient, with a storage and a version of its own, and what autograd has
    accumulated is freed. Unlike with `gradient_as_bucket_view` nobody shall see a difference:

    - First a bucket copies, and looks whether the gradients are gone when it collects the next time. If so, it lends.
    - A gradient that somebody else refers to, or to its memory, is written in place: they expect to see the average.
    - What was lent and is not gone when the bucket collects, because it is kept or added up, gets memory of its own: the same
      object as before. If a view of it or an array is about, too, or if the parameter has it no more (it is in a list, say),
      it stays, and the bucket uses other memory as long as it does, in which it takes longer to reduce: it is not shared with
      the other ranks. In both cases the bucket lends nothing for a while, each time for twice as long.

    As long as one lent gradient lives, so does the memory of its whole bucket.

    Each rank decides for itself. Only on CPUs, and only gradients that are worth it.

    Args:
        indices: the parameters' in the reducer.
        parameters: the bucket's.
        views: of the bucket's memory, one for each.
    """

    def __init__(self, indices: Sequence[int], parameters: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor]) -> None:
        self._indices = indices
        self._parameters = parameters
        self._views = views
        self._large = [position for position, view in enumerate(views) if view.nbytes >= LEAST_LENT_BYTES]
        self._is_trusted = False
        self._copied: list[StorageWeakRef] = []
        self._loans: dict[int, StorageWeakRef] = {}
        self._pause, self._next_pause, self._clean = 0, FIRST_PAUSE, 0

    @classmethod
    def of(
        cls, indices: Sequence[int], parameters: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor]
    ) -> Lending | None:
        """None if there is nothing to lend."""
        lending = cls(indices, parameters, views)
        return lending if lending._large and views[0].is_cpu and CAN_COUNT else None

    def lend(self, gradients: list[torch.Tensor | None], untouched: Collection[int]) -> frozenset[int]:
        """Give parameters the bucket's memory for their gradients, where nobody sees a difference.

        Args:
            gradients: the parameters'; nobody else may refer to these but the parameters. Those that are replaced are
                forgotten.
            untouched: those, by index, whose gradients shall stay as they are.

        Returns:
            Those, by index, whose gradients lie in the bucket now, so that nothing is to be written back.
        """
        if self._pause or self._loans:
            return frozenset()
        candidates = [position for position in self._large if self._indices[position] not in untouched]
        if not self._is_trusted:
            self._copied = [_memory_of(gradient) for position in candidates if (gradient := gradients[position]) is not None]
            return frozenset()
        for position in candidates:
            gradient = torch.from_dlpack(self._views[position])  # type: ignore[attr-defined]  # it is there
            if is_nobody_elses(gradients, position):  # asked last, for another thread may take it
                self._parameters[position].grad = gradients[position] = gradient
                self._loans[position] = _memory_of(gradient)
        return frozenset(self._indices[position] for position in self._loans)

    def take_back(self) -> bool:
        """The bucket needs its memory: move what still lies there, if it can be moved.

        Returns:
            Whether the memory is free.
        """
        kept = {position: memory for position, memory in self._loans.items() if not _is_gone(memory)}
        self._loans = {position: memory for position, memory in kept.items() if not self._move(position, memory)}
        if kept or not all(map(_is_gone, self._copied)):
            self._rest()
        elif self._pause:
            self._pause -= 1
        else:
            self._is_trusted = self._is_trusted or bool(self._copied)
            self._count_clean()
        self._copied = []
        return not self._loans

    def _move(self, position: int, memory: StorageWeakRef) -> bool:
        """Give a parameter's gradient memory of its own, if it has lent one, and nobody else uses it.

        Returns:
            Whether nobody uses the lent memory any more.
        """
        gradient = self._parameters[position].grad
        if gradient is None or gradient.untyped_storage()._cdata != memory.cdata:
            return False
        if gradient.untyped_storage().data_ptr() != self._views[position].data_ptr():
            return True  # its storage was moved: into memory that is shared with other processes, say
        if is_only_user_of_its_memory(gradient):
            with torch.inference_mode(False):
                gradient.data = gradient.detach().clone()
        return _is_gone(memory)

    def _rest(self) -> None:
        self._is_trusted, self._clean = False, 0
        if not self._pause:
            self._pause, self._next_pause = self._next_pause, 2 * self._next_pause

    def _count_clean(self) -> None:
        self._clean += 1
        if self._clean >= CLEAN_PAUSES * self._next_pause:
            self._clean, self._next_pause = 0, max(FIRST_PAUSE, self._next_pause // 2)


def _is_gone(memory: StorageWeakRef) -> bool:
    """Whether nobody can read or write there any more."""
    gone: bool = memory.expired()  # type: ignore[no-untyped-call]
    return gone


def _memory_of(gradient: torch.Tensor) -> StorageWeakRef:
    """Tells when nobody uses it any more, and keeps nobody from anything (`torch.utils.swap_tensors` minds weak references)."""
    return StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
