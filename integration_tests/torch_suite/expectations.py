"""Outcomes of torch's tests that stock Gloo with torch's DDP passes on two CPU ranks: all pass except these.

torch's SyncBatchNorm refuses CPUs, so Gloo passes none of its tests. Ours passes all of them.
"""

from __future__ import annotations

from pathlib import Path

from variants import PLAYED, VARIANTS

PASSING_ON_GLOO = Path(__file__).with_name("passing_on_gloo.txt").read_text().split()
# The list with tests for GPUs, run on CPUs; the list above is a part of this one.
PASSING_ON_GLOO_PLAYED = Path(__file__).with_name("passing_on_gloo_played.txt").read_text().split()

# All tests that make a SyncBatchNorm, except one that needs torchvision, and one that torch always skips.
SYNC_BATCH_NORM = [
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_ddp_inference",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_sync_bn_logged",
]

_OUR_BACKEND = {"test_get_backend": "asks for the name 'gloo'"}
_OF_ITS_REDUCER = "reads private attributes of torch's reducer"
_LATER = "expects the error of an unused parameter at the next forward; here it comes at the end of the backward that missed it"
_PROFILING = "asks that the events of a collective end on another thread than they began on"
_OUR_DDP_PLAYED = {
    "test_ddp_build_debug_param_to_name_mapping": _OF_ITS_REDUCER,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": _OF_ITS_REDUCER,
    "test_ddp_control_flow_different_across_ranks": _OF_ITS_REDUCER,
    "test_ddp_control_flow_same_across_ranks": _OF_ITS_REDUCER,
    "test_ddp_native_mixed_precision_ignored_params": "reads torch's private copies of the parameters in low precision",
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _LATER,
    "test_ddp_multiple_nested_unused_params_error": _LATER,
    "test_ddp_unused_params_rebuild_buckets_exception": _LATER,
    "test_ddp_profiling_torch_profiler": _PROFILING,
    "test_invalid_static_graph": "asks for torch's sentences about a graph that is not static; ours name the parameters",
}
_ONE_REDUCER = {"test_ddp_static_graph_nested_types": "wraps a DDP in a DDP: two reducers for the same parameters are refused"}
_OUR_HOOKS_PLAYED = {
    "test_ddp_hook_parity_post_localSGD": "leaves it to PostLocalSGDState to make a group, which is a collective, and refused",
    "test_post_localSGD_optimizer_step_reload": "loads a state without the averager's step, which is refused",
}

# By variant: the tests that do not pass, and why. If one passes, this is an error, so that the table stays true.
NOT_PASSING: dict[str, dict[str, str]] = {
    "syncline-mpi, our DDP": _OUR_BACKEND,
    "gloo, our DDP": {},
    "syncline-mpi, torch's DDP": _OUR_BACKEND,
    f"syncline-mpi, our DDP{PLAYED}": _OUR_BACKEND | _OUR_DDP_PLAYED | _ONE_REDUCER,
    f"syncline-mpi, our DDP, SyncBatchNorm and hooks{PLAYED}": _OUR_HOOKS_PLAYED,
    f"gloo, our DDP{PLAYED}": _OUR_DDP_PLAYED,
    f"syncline-mpi, torch's DDP{PLAYED}": _OUR_BACKEND | {"test_ddp_profiling_torch_profiler": _PROFILING},
}

_EVERYTHING = "syncline-mpi, our DDP"  # variants without our SyncBatchNorm and hooks are parts of it
_ONE_IN = 6


def chosen_for(variant: str, *, everything: bool) -> list[str]:
    """The tests to run: all that are about the variant, or, to save time, those that a change may break first.

    Args:
        variant: a key of `NOT_PASSING`.
        everything: also run tests that are not expected to pass, each of which costs a start of the ranks; and for variants
            that are parts of another, run all tests instead of a sample.
    """
    passing_on_gloo = PASSING_ON_GLOO_PLAYED if variant.endswith(PLAYED) else PASSING_ON_GLOO
    runs_all = variant.removesuffix(PLAYED) == _EVERYTHING or VARIANTS[variant].has_our_hooks
    if VARIANTS[variant].has_our_hooks:
        tests = [*SYNC_BATCH_NORM, *(name for name in passing_on_gloo if _is_about(name, _OF_HOOKS))]
    else:
        tests = passing_on_gloo if runs_all else [name for name in passing_on_gloo if _is_about(name, _OF_DDP)]
    if everything:
        return list(tests)
    passing = [test for test in tests if test not in NOT_PASSING[variant]]
    return passing if runs_all else passing[::_ONE_IN]


# Parts of names of tests whose outcome depends on the DDP or the hooks; all others behave as in another variant.
_OF_DDP = ("ddp", "DDP", "DistributedDataParallel", "static")
_OF_HOOKS = ("hook", "localSGD", "averager")


def _is_about(test: str, words: tuple[str, ...]) -> bool:
    return any(word in test for word in words)
