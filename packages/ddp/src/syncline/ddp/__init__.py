"""DistributedDataParallel over the communication stack a cluster already has."""

from .distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
