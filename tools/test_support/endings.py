"""The checks of a group's end that the tests run: `dev.py test --full` runs all of them."""

from __future__ import annotations

from syncline.collectives.testing.conformance.endings import ENDINGS, LIMITED

from .full_run import cases

# At the time limit, most collectives of a group end by the same code, and each check waits for seconds. An all-to-all over MPI
# waits for messages of its own.
_OTHER_LIMITS = [f"ends {name} at the time limit" for name in LIMITED if name not in ("all_reduce", "all_to_all")]
ENDINGS_TO_RUN = cases([name for name in ENDINGS if name not in _OTHER_LIMITS], in_full=_OTHER_LIMITS)
