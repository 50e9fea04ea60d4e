"""An alternative to torch's DistributedDataParallel that uses the communication library of the cluster."""

from .distributed_data_parallel import DistributedDataParallel
from .elastic import Elastic
from .elastic_sampler import ElasticSampler
from .join import Join, Joinable, JoinHook
from .mixed_precision import MixedPrecision
from .sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from .version import __version__

__all__ = [
    "DistributedDataParallel",
    "Elastic",
    "ElasticSampler",
    "Join",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "SyncBatchNorm",
    "__version__",
    "convert_sync_batchnorm",
]
