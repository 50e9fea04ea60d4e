"""The replacements while torch's tests run."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Variant:
    """One way to run torch's distributed tests.

    Attributes:
        backend: the tests' backend of torch.distributed.
        has_our_ddp: whether `syncline.ddp.DistributedDataParallel` replaces torch's.
        has_our_hooks: whether `syncline.ddp.SyncBatchNorm` and the hooks of `syncline.hooks` replace torch's.
        plays_gpus: whether tests that need a GPU for each rank run on CPUs; see `cpu_in_place_of_gpu`.
    """

    backend: str
    has_our_ddp: bool
    has_our_hooks: bool = False
    plays_gpus: bool = False

    @property
    def needs_mpi(self) -> bool:
        """Whether mpiexec starts the ranks."""
        return self.backend == "syncline-mpi"


VARIANTS = {
    "gloo, torch's DDP": Variant("gloo", has_our_ddp=False),
    "syncline-mpi, our DDP": Variant("syncline-mpi", has_our_ddp=True),
    "syncline-mpi, our DDP, SyncBatchNorm and hooks": Variant("syncline-mpi", has_our_ddp=True, has_our_hooks=True),
    "gloo, our DDP": Variant("gloo", has_our_ddp=True),
    "syncline-mpi, torch's DDP": Variant("syncline-mpi", has_our_ddp=False),
}
PLAYED = ", tests for GPUs on CPUs"
VARIANTS |= {f"{name}{PLAYED}": replace(variant, plays_gpus=True) for name, variant in VARIANTS.items()}
