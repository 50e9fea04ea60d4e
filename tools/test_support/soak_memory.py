"""How much memory a rank of the soak may need above what it had before the load: computed before the run, from its parts.

Note [The bound of the soak]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Let P be the ranks, T the threads that issue, G the groups, n the bytes of the largest tensor.

1. *Tensors of the program*, T (P + 2) n. The call that needs most is a reduce-scatter: the tensor, P of them in one block, and
   the output.
2. *Copies in flight*, T P n: a host group, or the MPI library, copies the largest buffer of a call at most once.
3. *Shared memory*, G P (slots of the staging area + eager slots of two turns).
4. *Plans*, G x 256 x (slots x 2 lengths x (P + 1) views of 1 KiB): the group forgets all when it has that many.
5. *MPI's own shared memory*, P x 16 MiB: the segment of one rank that Open MPI makes by default is that long, MPICH's shorter.
6. *What the allocator keeps*. With `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` set to H, glibc gives every block of
   H and more back to the system when it is freed. What is left are blocks below H: of the 2 T threads (those that issue, and
   those of the groups) each has at most 16 in hand, in an arena of its own. An allocator that takes the first block that fits
   needs at most log2(H / 16 bytes) times what is in hand (J. M. Robson, "Worst case fragmentation of first fit and best fit
   storage allocation strategies", The Computer Journal 20 (3), 1977). So 2 T x 16 H x log2(H / 16 bytes).

If nobody sets H, glibc raises it, up to 32 MiB, to the largest block that was freed, and part 6 says nothing of use. Parts 1,
2 and 4 hold whatever the allocator keeps: they bound what it has handed out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from syncline.collectives.engine.group import MOST_PLANS
from syncline.collectives.startup.algorithm_thresholds import AlgorithmThresholds
from syncline.collectives.transports.mpi.node.copy_in_copy_out import SLOT_BYTES, SLOTS

_TURNS = 2
_VIEW_BYTES = 1 << 10
_MPI_SEGMENT_BYTES = 16 << 20
_SMALL_BLOCKS = 16
_GRANULE_BYTES = 16


@dataclass(frozen=True)
class Load:
    """What the bound depends on.

    Attributes:
        ranks: of each group, all on one node.
        threads: that issue collectives, each on a group of its own.
        groups: those, and the first one.
        largest_bytes: of the tensors that they pass.
    """

    ranks: int
    threads: int
    groups: int
    largest_bytes: int


def handed_out_parts(load: Load) -> Mapping[str, int]:
    """The parts that the allocator has handed out, in bytes; see Note [The bound of the soak]. A pure function."""
    views = SLOTS * 2 * (load.ranks + 1)
    return {
        "tensors": load.threads * (load.ranks + 2) * load.largest_bytes,
        "copies": load.threads * load.ranks * load.largest_bytes,
        "plans": load.groups * MOST_PLANS * views * _VIEW_BYTES,
    }


def resident_parts(load: Load, threshold_bytes: int) -> Mapping[str, int]:
    """The parts of all resident memory, in bytes, where the allocator keeps to a threshold. A pure function."""
    in_hand = 2 * load.threads * _SMALL_BLOCKS * threshold_bytes
    return {
        **handed_out_parts(load),
        "shared": load.groups * load.ranks * (SLOTS * SLOT_BYTES + _TURNS * AlgorithmThresholds.eager_bytes),
        "MPI": load.ranks * _MPI_SEGMENT_BYTES,
        "allocator": int(in_hand * log2(threshold_bytes / _GRANULE_BYTES)),
    }


def in_words(parts: Mapping[str, int]) -> str:
    """The sum and its parts, in MiB."""
    each = ", ".join(f"{name} {nbytes / 2**20:.0f}" for name, nbytes in parts.items())
    return f"{sum(parts.values()) / 2**20:.0f} MiB ({each})"
