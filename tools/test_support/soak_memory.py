"""How much memory a rank of the soak may need in addition to its memory before: computed before the run, from its parts.

Note [The bound of the soak]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Let P be the ranks, T the threads that issue, G the groups, n the bytes of the largest tensor.

1. *Tensors of the program*, T (P + 2) n. A reduce-scatter needs most: the tensor, P of them in one block, and the output. 2.
   *Copies in flight*, T P n: a host group, or the MPI library, copies the largest buffer of a call at most once. 3. *Shared
   memory*, G P (slots of the staging area + eager slots of two turns). 4. *Plans*, G x 256 x (slots x 2 lengths x (P + 1) views
   of 1 KiB): a group with this number of plans forgets all of them. 5. *MPI's own shared memory*, P x 16 MiB: the length of one
   rank's segment in Open MPI by default; MPICH's is shorter. 6. *Memory that the allocator keeps*. If `MALLOC_MMAP_THRESHOLD_`
   and `MALLOC_TRIM_THRESHOLD_` are set to H, glibc gives every freed block of H and more back to the system. Blocks below H
   remain. Each of the 2 T threads (those that issue, and those of the groups) has at most 16 in hand, in an arena of its own.
   An allocator that takes the first block that fits needs at most log2(H / 16 bytes) times the memory in hand (J. M. Robson,
   "Worst case fragmentation of first fit and best fit storage allocation strategies", The Computer Journal 20 (3), 1977). So 2
   T x 16 H x log2(H / 16 bytes).

If H is not set, glibc raises it, up to 32 MiB, to the largest block that was freed, and part 6 is too large to be useful. Parts
1, 2 and 4 hold in any case: they bound the memory that the allocator has handed out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from syncline.collectives.engine.engine_group import MOST_PLANS
from syncline.collectives.startup.settings import AlgorithmThresholds
from syncline.collectives.transports.mpi.node.copy_in_copy_out import SLOT_BYTES, SLOTS

_TURNS = 2
_VIEW_BYTES = 1 << 10
_MPI_SEGMENT_BYTES = 16 << 20
_SMALL_BLOCKS = 16
_GRANULE_BYTES = 16


@dataclass(frozen=True)
class Load:
    """The figures on which the bound depends.

    Attributes:
        ranks: in each group, all on one node.
        threads: how many issue collectives, each on its own group.
        groups: these groups, and the first one.
        largest_bytes: the largest tensor that they pass.
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
    """The parts of all resident memory, in bytes, if the allocator has a fixed threshold. A pure function."""
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
