"""Compare the parameters of all ranks after every N steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from syncline.collectives import DisagreementError, ProcessGroup
from syncline.collectives.internal import all_gather_bytes, are_same_on_all_ranks
from syncline.reducer import IterationStatistics

from .module_state import ModuleState

EVERY_VARIABLE = "SYNCLINE_CHECK_REPLICAS"

HASH_BYTES = 16
# The number of lanes in a chunk (see `ReplicaHash`). On a CPU, a chunk stays in the cache. A GPU needs few, large operations.
_CHUNK_LANES = {"cpu": 1 << 15}
_DEVICE_CHUNK_LANES = 1 << 20
_SEED = 20_240_229
_MULTIPLIER = 6364136223846793005  # the multiplier of Knuth's 64-bit generator


class ReplicaHash:
    """Hashes the bits of tensors of any dtype and device.

    A lane is 32 bits of a tensor. A chunk is a fixed number of successive lanes. A hash has two halves of 64 bits. For each
    half, every lane is multiplied by an odd random 64-bit weight, and the products of a chunk are added up, modulo 2**64.
    Further multiplications combine the sums of the chunks.

    Tensors that differ in several lanes have the same hash with a probability of at most 2**-64. The hash does not protect
    against an attacker.
    """

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    def __call__(self, tensors: Iterable[torch.Tensor]) -> list[bytes]:
        """Return a hash of 16 bytes for each tensor. The call waits once for each GPU that holds a tensor."""
        halves = [self._halves(tensor.detach()) for tensor in tensors]
        by_device: dict[torch.device, list[int]] = {}
        for place, half in enumerate(halves):
            by_device.setdefault(half.device, []).append(place)
        found = [b""] * len(halves)
        for places in by_device.values():
            for place, numbers in zip(places, torch.stack([halves[place] for place in places]).tolist(), strict=True):
                found[place] = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
        return found

    def _halves(self, tensor: torch.Tensor) -> torch.Tensor:
        lanes = _lanes(tensor)
        weights = self._weights_on(tensor.device)
        total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        for chunk in torch.split(lanes, weights.shape[1]):
            wide = chunk.to(torch.int64)
            sums = [(wide * one[: wide.numel()]).sum() for one in weights]
            # Without the multiplier, the hash would not depend on the order of the chunks.
            total = total * _MULTIPLIER + torch.stack(sums)
        return total

    def _weights_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._weights:
            count = _CHUNK_LANES.get(device.type, _DEVICE_CHUNK_LANES)
            generator = torch.Generator().manual_seed(_SEED)
            weights = torch.randint(-(2**62), 2**62, (2, count), generator=generator, device="cpu")
            # The weights are odd: modulo 2**64, different lanes stay different after a product with an odd number.
            self._weights[device] = (2 * weights + 1).to(device)
        return self._weights[device]


def _lanes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as 32-bit integers, in the order of its elements."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    # `contiguous` does not change the stride of a single element. With some strides, torch refuses a view of bytes.
    flat = real.contiguous().as_strided((real.numel(),), (1,)).view(torch.uint8)
    rest = -flat.numel() % 4
    # torch shows 32-bit integers only from an address in the storage that is a multiple of four.
    if rest or flat.storage_offset() % 4:
        flat = torch.nn.functional.pad(flat, (0, rest)).clone()
    return flat.view(torch.int32)


class ReplicaCheck:
    """Compares the ranks' parameters every `every` steps.

    Cost: each check hashes all parameters, and all-reduces 16 bytes. If ranks differ, all ranks also gather 16 bytes for each
    parameter.
    """

    def __init__(self, group: ProcessGroup, state: ModuleState, every: int) -> None:
        self._group = group
        self._state = state
        self.every = every
        self._steps = self._same_at = 0
        self._hash = ReplicaHash()

    def note_step(self, seen: IterationStatistics) -> None:  # noqa: ARG002 - a listener's
        """Count a step. If a check is due, check the replicas; this is a collective."""
        self._steps += 1
        if self._steps % self.every == 0:
            self.check()
            self._same_at = self._steps

    def check(self) -> None:
        """Compare the parameters now. This is a collective.

        Raises:
            DisagreementError: on all ranks, if parameters differ. The text names the first parameter that differs.
        """
        parameters = self._state.parameters()
        hashes = b"".join(self._hash(parameter for _, parameter in parameters))
        if are_same_on_all_ranks(hashes, group=self._group):
            return
        names = [name for name, _ in parameters]
        earlier = f"they were equal after {self._same_at}" if self._same_at else "this is the first check"
        raise DisagreementError(
            f"{difference(names, all_gather_bytes(hashes, group=self._group))} ({self._group.place()}, checked after "
            f"{self._steps} averaged backwards; {earlier}). Look for parameters that are changed on some ranks only, or "
            "stepped before their gradients are averaged"
        )


def difference(names: Sequence[str], hashes: Sequence[bytes]) -> str:
    """Describe the first parameter that differs, and the ranks on which it differs.

    `hashes` has for each rank the concatenated hashes of all parameters.
    """
    # With different numbers of parameters, the hashes cannot be matched to names.
    if len({len(found) for found in hashes}) > 1:
        counts = ", ".join(str(len(found) // HASH_BYTES) for found in hashes)
        return f"the ranks have different numbers of parameters: {counts}"
    for number, name in enumerate(names):
        found = [one[number * HASH_BYTES : (number + 1) * HASH_BYTES] for one in hashes]
        others = [rank for rank, one in enumerate(found) if one != found[0]]
        if others:
            differing = sum(
                len({one[place : place + HASH_BYTES] for one in hashes}) > 1 for place in range(0, len(hashes[0]), HASH_BYTES)
            )
            return (
                f"the replicas differ: parameter '{name}' on rank(s) {', '.join(map(str, others))} is not that of rank 0; "
                f"{differing} of {len(names)} parameters differ"
            )
    return "the replicas differ"
