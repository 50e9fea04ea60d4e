"""Communication hooks for Syncline's DDP and torch's DDP: functions that reduce a bucket of gradients over the ranks."""

from .adasum import adasum_hook
from .allreduce import allreduce_hook, noop_hook
from .batched_power_sgd import batched_powerSGD_hook
from .between_sites import bf16_between_sites_hook
from .cast import bf16_compress_hook, bf16_compress_wrapper, fp16_compress_hook, fp16_compress_wrapper
from .compression import CompressionState, compression_hook
from .compressor import Compressor, LinearCompressor
from .diloco import DiLoCoOptimizer
from .error_feedback import ErrorFeedback
from .local_sgd import PostLocalSGDState, post_localSGD_hook
from .local_sgd_optimizer import PostLocalSGDOptimizer
from .low_rank import compression_ratio
from .model_averaging import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
from .power_sgd import powerSGD_hook
from .power_sgd_state import PowerSGDState
from .quantize import Int4, Int8, OneBit
from .saved_state import merge_states
from .schedule import Phase, ScheduleState, schedule_hook
from .sites import Sites
from .sparsify import RandomK, TopK
from .statistics import HookStatistics
from .version import __version__

__all__ = [
    "CompressionState",
    "Compressor",
    "DiLoCoOptimizer",
    "ErrorFeedback",
    "HierarchicalModelAverager",
    "HookStatistics",
    "Int4",
    "Int8",
    "LinearCompressor",
    "ModelAverager",
    "OneBit",
    "PeriodicModelAverager",
    "Phase",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDState",
    "RandomK",
    "ScheduleState",
    "Sites",
    "TopK",
    "__version__",
    "adasum_hook",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_between_sites_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "compression_hook",
    "compression_ratio",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "merge_states",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "schedule_hook",
]
