"""What becomes of those of torch's tests that stock Gloo with torch's DDP passes on two CPU ranks: all pass but these."""

from __future__ import annotations

from pathlib import Path

from variants import PLAYED

PASSING_ON_GLOO = Path(__file__).with_name("passing_on_gloo.txt").read_text().split()
# The same with tests for GPUs on CPUs; the list above is a part of this one.
PASSING_ON_GLOO_PLAYED = Path(__file__).with_name("passing_on_gloo_played.txt").read_text().split()

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
    "test_ddp_comm_hook_logging": "asks for the name of the built-in hook ALLREDUCE, which is plain averaging and no hook here",
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _LATER,
    "test_ddp_multiple_nested_unused_params_error": _LATER,
    "test_ddp_unused_params_rebuild_buckets_exception": _LATER,
    "test_ddp_profiling_torch_profiler": _PROFILING,
    "test_invalid_static_graph": _LATER,
    "test_ddp_static_graph_nested_types": "wraps a DDP in a DDP: two reducers for the same parameters are refused",
    "test_skip_all_reduce_unused_parameters": "counts buckets; here bucket_cap_mb does not hold for the first one",
}

# By variant: the tests that do not pass, and why. One that passes all the same is an error, so that the table stays true.
NOT_PASSING: dict[str, dict[str, str]] = {
    "syncline-mpi, our DDP": _OUR_BACKEND,
    "gloo, our DDP": {},
    "syncline-mpi, torch's DDP": _OUR_BACKEND,
    f"syncline-mpi, our DDP{PLAYED}": _OUR_BACKEND | _OUR_DDP_PLAYED,
    f"gloo, our DDP{PLAYED}": _OUR_DDP_PLAYED,
    f"syncline-mpi, torch's DDP{PLAYED}": _OUR_BACKEND | {"test_ddp_profiling_torch_profiler": _PROFILING},
}

_EVERYTHING = "syncline-mpi, our DDP"  # of which the others are parts
_ONE_IN = 6


def chosen_for(variant: str, *, everything: bool) -> list[str]:
    """The tests to run: all that say something about the variant, or, to save time, those that a change may break first.

    Args:
        variant: a key of `NOT_PASSING`.
        everything: also those that are not expected to pass, each of which costs a start of the ranks; and of the variants
            that are parts of another all tests in place of a sample.
    """
    passing_on_gloo = PASSING_ON_GLOO_PLAYED if variant.endswith(PLAYED) else PASSING_ON_GLOO
    runs_all = variant.removesuffix(PLAYED) == _EVERYTHING
    tests = passing_on_gloo if runs_all else [name for name in passing_on_gloo if _is_about_ddp(name)]
    if everything:
        return list(tests)
    passing = [test for test in tests if test not in NOT_PASSING[variant]]
    return passing if runs_all else passing[::_ONE_IN]


def _is_about_ddp(test: str) -> bool:
    """Whether only a DDP changes what becomes of it; the rest would be as in another variant."""
    return any(word in test for word in ("ddp", "DDP", "DistributedDataParallel", "static"))
