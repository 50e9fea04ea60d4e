"""DistributedDataParallel over the communication stack a cluster already has."""

from .distributed_data_parallel import DistributedDataParallel
from .join import Join, Joinable, JoinHook

__all__ = ["DistributedDataParallel", "Join", "JoinHook", "Joinable"]
