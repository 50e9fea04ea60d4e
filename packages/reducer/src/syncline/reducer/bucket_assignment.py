"""Decide which gradients share a bucket, from their sizes and kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from syncline.collectives import InvalidArgumentError


@dataclass(frozen=True)
class GradientSpec:
    """The properties of one gradient that decide its bucket.

    Attributes:
        nbytes: size of the dense gradient in bytes.
        kind: for example (dtype, device). Only gradients of equal kinds share a bucket.
        sparse: whether the gradient is sparse. A sparse gradient gets its own bucket.
    """

    nbytes: int
    kind: Hashable = None
    sparse: bool = False


@dataclass(frozen=True)
class BucketAssignment:
    """The gradients that share one bucket, and the size limit of this bucket.

    Attributes:
        indices: the positions of these gradients in the `specs` of `assign_buckets`, in the order of the bucket.
        cap_bytes: the size limit of this bucket in bytes; None for the bucket of a sparse gradient.
    """

    indices: tuple[int, ...]
    cap_bytes: int | None


def assign_buckets(
    specs: Sequence[GradientSpec], caps_bytes: Sequence[int], order: Sequence[int] | None = None
) -> list[BucketAssignment]:
    """Put the gradients into buckets, in the given order, as torch.distributed does.

    A bucket contains only gradients of one kind, such as one dtype and device. A bucket that has reached its size limit (cap)
    is closed; its last gradient may exceed the cap. For every kind, the first bucket has the first cap, the second bucket the
    second cap, and so on. The last cap also applies to further buckets.

    Args:
        specs: one spec for each gradient. The result refers to a gradient by its position in this list.
        caps_bytes: size limits in bytes of the first, second, ... bucket of each kind; at least one.
        order: the indices of `specs` in the order in which gradients come, each index once. None means the order of `specs`.

    Returns:
        The buckets. Every index is in exactly one bucket. Without `order`, the buckets are sorted by their smallest index. With
        `order`, closed buckets come first, in the order in which they were closed. The other buckets follow, in the order of
        their last gradients.

    Raises:
        InvalidArgumentError: there is no cap, a cap is below 0, or `order` is not a permutation.
    """
    visited = range(len(specs)) if order is None else order
    _check(specs, caps_bytes, visited)
    open_buckets: dict[Hashable, list[int]] = {}
    nbytes: Counter[Hashable] = Counter()
    closed: Counter[Hashable] = Counter()
    buckets: list[BucketAssignment] = []

    def cap_bytes(kind: Hashable) -> int:
        return caps_bytes[min(closed[kind], len(caps_bytes) - 1)]

    def close(kind: Hashable) -> BucketAssignment:
        bucket = BucketAssignment(tuple(open_buckets.pop(kind)), cap_bytes(kind))
        closed[kind] += 1
        nbytes[kind] = 0
        return bucket

    for index in visited:
        spec = specs[index]
        # The size of a sparse gradient is known only when the gradient comes, so its bucket has no cap.
        if spec.sparse:
            buckets.append(BucketAssignment((index,), None))
            continue
        open_buckets.setdefault(spec.kind, []).append(index)
        nbytes[spec.kind] += spec.nbytes
        if nbytes[spec.kind] >= cap_bytes(spec.kind):
            buckets.append(close(spec.kind))
    # Buckets that are still open: none of them has reached its cap.
    position = {index: place for place, index in enumerate(visited)}
    rest = [close(kind) for kind in list(open_buckets)]
    buckets += sorted(rest, key=lambda bucket: position[bucket.indices[-1]])
    return buckets if order is not None else sorted(buckets, key=lambda bucket: min(bucket.indices))


def _check(specs: Sequence[GradientSpec], caps_bytes: Sequence[int], order: Sequence[int]) -> None:
    if not caps_bytes or min(caps_bytes) < 0:
        raise InvalidArgumentError(f"expected at least one bucket size limit, none below 0 bytes, found {list(caps_bytes)}")
    if sorted(order) != list(range(len(specs))):
        raise InvalidArgumentError(f"expected an order that names each of the {len(specs)} gradients once, found {list(order)}")
