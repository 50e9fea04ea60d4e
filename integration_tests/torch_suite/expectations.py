"""What becomes of those of torch's tests that stock Gloo with torch's DDP passes on two CPU ranks: all pass but these."""

from __future__ import annotations

from pathlib import Path

PASSING_ON_GLOO = Path(__file__).with_name("passing_on_gloo.txt").read_text().split()

_OUR_BACKEND = {
    "test_get_backend": "asks for the name 'gloo'",
    "test_monitored_barrier_gloo": "torch's monitored_barrier refuses every backend but Gloo by name; ours is in torch_backend",
    "test_monitored_barrier_gloo_subgroup": "as test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout": "not done: a limit of 0 s means the group's limit here",
}

# By variant: the tests that do not pass, and why. One that passes all the same is an error, so that the table stays true.
NOT_PASSING: dict[str, dict[str, str]] = {
    "syncline-mpi, our DDP": _OUR_BACKEND,
    "gloo, our DDP": {},
    "syncline-mpi, torch's DDP": _OUR_BACKEND,
}

# What only a DDP changes; the rest would be as in another variant.
ABOUT_DDP = [
    name for name in PASSING_ON_GLOO if any(word in name for word in ("ddp", "DDP", "DistributedDataParallel", "static"))
]
_EVERYTHING = "syncline-mpi, our DDP"  # of which the others are parts
_ONE_IN = 6


def chosen_for(variant: str, *, everything: bool) -> list[str]:
    """The tests to run: all that say something about the variant, or, to save time, those that a change may break first.

    Args:
        variant: a key of `NOT_PASSING`.
        everything: also those that are not expected to pass, each of which costs a start of the ranks; and of the variants
            that are parts of another all tests in place of a sample.
    """
    tests = PASSING_ON_GLOO if variant == _EVERYTHING else ABOUT_DDP
    if everything:
        return list(tests)
    passing = [test for test in tests if test not in NOT_PASSING[variant]]
    return passing if variant == _EVERYTHING else passing[::_ONE_IN]
