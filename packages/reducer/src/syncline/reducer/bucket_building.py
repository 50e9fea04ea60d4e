"""Build buckets: assign parameters to them, and allocate their memory."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from syncline.collectives import ProcessGroup

from .bucket import Bucket, Layout, set_view
from .bucket_assignment import GradientSpec, assign_buckets
from .sparse_bucket import AnyBucket, SparseBucket


@dataclass(frozen=True)
class BucketBuilder:
    """Assigns parameters to buckets and allocates the buckets.

    Attributes:
        parameters: the parameters. The index of a parameter is its position in this list.
        layouts: the layouts that the parameters had when the ranks compared them.
        group: the group whose ranks average their gradients. The group allocates the buckets' memory.
        caps_bytes: size limits of the first, second, ... bucket. The last limit also applies to all further buckets.
        sparse: for each parameter, whether its gradient is sparse. A sparse gradient has its own bucket.
        delayed: indices of parameters whose buckets come last and have no size limit.
        as_view: whether gradients are views of the buckets' memory.
    """

    names: Sequence[str]
    parameters: Sequence[torch.nn.Parameter]
    layouts: Sequence[Layout]
    group: ProcessGroup
    caps_bytes: Sequence[int]
    sparse: Sequence[bool]
    delayed: Collection[int]
    as_view: bool

    def assign_first(self) -> list[list[int]]:
        """Return the members (parameters' indices) of the first buckets, used until the order of gradients is known.

        The order is the reverse order of the parameters' definition. With one size limit, each bucket has the same parameters
        as in torch. With several limits, the first limit is for the bucket that is reduced first.
        """
        backwards = range(len(self.parameters) - 1, -1, -1)
        return self.assign(backwards, from_front=len(self.caps_bytes) == 1)

    def assign(self, order: Sequence[int], *, from_front: bool = False) -> list[list[int]]:
        """Assign the parameters to buckets in this order, with delayed parameters last. Return the members of each bucket.

        `order` has the indices of the parameters. With `from_front`, start with the last index of `order`.
        """
        punctual = [index for index in order if index not in self.delayed]
        delayed = [index for index in order if index in self.delayed]
        assign = self._assign_from_front if from_front else self._assign
        return [*assign(punctual, self.caps_bytes), *self._assign(delayed, [sys.maxsize])]

    def nbytes(self, members: Sequence[int]) -> int:
        """Return the size in bytes of a bucket with these members. A sparse gradient counts 0 bytes."""
        return sum(self.parameters[index].nbytes for index in members if not self.sparse[index])

    def build(self, assigned: Sequence[Sequence[int]], kept_views: Collection[int] = ()) -> list[AnyBucket]:
        """Allocate buckets with these members. This is a collective.

        The gradients of the parameters in `kept_views` become views of the new buckets, and keep their values.
        """
        buckets: list[AnyBucket] = []
        for indices in assigned:
            buckets.append(self._bucket(indices))
            with torch.no_grad():
                for index, parameter, view in _members(buckets[-1]):
                    # Move the gradient from its old bucket to the new one. The last move frees the old bucket's memory.
                    if index in kept_views and parameter.grad is not None:
                        view.copy_(parameter.grad)
                        set_view(parameter, view)
        return buckets

    def _assign(self, order: Sequence[int], caps_bytes: Sequence[int]) -> list[list[int]]:
        specs = [self._spec(index) for index in order]
        assigned = assign_buckets(specs, caps_bytes, range(len(order)))
        return [[order[position] for position in bucket.indices] for bucket in assigned]

    def _assign_from_front(self, backwards: Sequence[int], caps_bytes: Sequence[int]) -> list[list[int]]:
        """Assign parameters to buckets, beginning with the last index of `backwards`.

        The buckets in the result, and the members of each bucket, have the order of `backwards`.
        """
        forwards = self._assign(backwards[::-1], caps_bytes)
        return [bucket[::-1] for bucket in sorted(forwards, key=min, reverse=True)]

    def _spec(self, index: int) -> GradientSpec:
        parameter = self.parameters[index]
        return GradientSpec(parameter.nbytes, (parameter.dtype, parameter.device), self.sparse[index])

    def _bucket(self, indices: Sequence[int]) -> AnyBucket:
        parameters, names = [self.parameters[i] for i in indices], [self.names[i] for i in indices]
        if self.sparse[indices[0]]:
            return SparseBucket(indices[0], parameters[0], names[0], self.group)
        layouts = [self.layouts[i] for i in indices]
        return Bucket(indices, parameters, names, layouts, self.group, as_view=self.as_view)


def gradients_as_views(buckets: Sequence[AnyBucket]) -> set[int]:
    """Return the indices of the parameters whose gradients are views of these buckets."""
    return {index for bucket in buckets for index, parameter, view in _members(bucket) if parameter.grad is view}


def _members(bucket: AnyBucket) -> zip[tuple[int, torch.nn.Parameter, torch.Tensor]]:
    # A sparse bucket has no views, so the result is empty.
    return zip(bucket.indices, bucket.parameters, bucket.views, strict=False)
