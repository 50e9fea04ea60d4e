"""Calls a function in a fork of this process."""

from __future__ import annotations

import os
import pickle
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from .waiting import WAIT_S


class ForkedError(AssertionError):
    """The fork did not end in time, or ended without an answer."""


def in_fork(body: Callable[[], Any]) -> Any:
    """Call a function in a fork of this process, which then ends; returns what it returned, or its error as "Type: text"."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, a fork warns if other threads run
        child = os.fork()
    if child == 0:
        try:
            os.close(read)
            os.write(write, pickle.dumps(answer_of(body)))
        except BaseException:  # noqa: BLE001 - the fork must not go on with the tests
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    try:
        answer = b""
        while select.select([read], [], [], WAIT_S)[0]:
            part = os.read(read, 1 << 16)
            if not part:
                break
            answer += part
        else:
            os.kill(child, signal.SIGKILL)
            raise ForkedError(f"the fork hung for {WAIT_S:g} s")
    finally:
        os.close(read)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not answer:
        raise ForkedError(f"the fork ended without an answer, with status {status}")
    return pickle.loads(answer)


def answer_of(body: Callable[[], Any]) -> Any:
    """What a function returns, or its error as "Type: text"."""
    try:
        return body()
    except Exception as error:  # noqa: BLE001 - it is the answer
        return f"{type(error).__name__}: {error}"
