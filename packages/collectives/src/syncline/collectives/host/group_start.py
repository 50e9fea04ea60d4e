"""What the ranks of a new group agree on before its first collective."""

from __future__ import annotations

import time
from collections.abc import Mapping
from zlib import crc32

from ..contract.deadline import Deadline
from ..contract.statements import Statements
from ..errors import CollectiveTimeout, DisagreementError
from .control_messages import ControlMessages, statements_for_error


def agree_on_start(messages: ControlMessages, rank: int, size: int, options: Mapping[str, object], deadline: Deadline) -> str:
    """Compare options that change what the ranks communicate, by messages that do not depend on them. A collective.

    Cost: ceil(log2(size)) messages from each rank, one after the other.

    Returns:
        A name for the run, the same on all ranks, and another one in another run: the time.

    Raises:
        DisagreementError: the ranks were given different options; on all ranks.
        CollectiveTimeout: a rank did not come.
    """
    text = options_in_words(options)
    digest = crc32(text.encode())
    try:
        largest, negative, started_ns = messages.maximum((digest, -digest, time.time_ns()), deadline)
        if largest != -negative:
            raise DisagreementError(different_options(statements_for_error(messages, text, deadline)))
    except TimeoutError as error:
        raise CollectiveTimeout(
            f"rank {rank} of {size} has connected, but not all ranks compared their options: {error}"
        ) from error
    return name_of_run(started_ns)


def options_in_words(options: Mapping[str, object]) -> str:
    """In the order of their names. A pure function."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))


def name_of_run(started_ns: int) -> str:
    """Of a run that began then, in nanoseconds since the epoch; in UTC. A pure function."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(started_ns // 10**9))}-{started_ns % 10**9 // 1000:06d}"


def different_options(said: Statements) -> str:
    """What is wrong, in words. A pure function.

    Args:
        said: the options of the ranks.
    """
    options = said.in_words()
    return (
        f"the ranks were given different options ({options}); pass the same to init_process_group on all, and in the site file"
    )
