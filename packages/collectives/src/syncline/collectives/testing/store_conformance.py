"""Checks that every `Store` must pass, including a store of another package.

Each check takes a function that opens another handle (a `Store` object) of the same store. The store is empty at first::

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check):
        server = MyServer()
        check(lambda: MyStore(server.address))

If the handle itself holds the keys and values, the function returns the same object each time. A check fails with an
AssertionError, also if a call of the store never returns.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ..errors import InvalidArgumentError, StoreTimeout, SynclineError, TransportError
from ..stores import Store

OpenStore: TypeAlias = Callable[[], Store]
StoreCheck: TypeAlias = Callable[[OpenStore], None]
Result = TypeVar("Result")

THREADS = 8
ROUNDS = 15
SHORT_S = 0.05
LONG_S = 30.0
LATE_S = 10.0
"""How much later than its time limit a wait may end. The machine may be busy."""
CHECK_S = 120.0
"""The time limit of one check."""


def values_are_bytes_and_the_last_one_counts(open_store: OpenStore) -> None:
    """Check that `set` replaces a value. `get` must return bytes unchanged, and a str as UTF-8 bytes."""
    writer, reader = open_store(), open_store()
    every_byte = bytes(range(256)) * 3
    blank = b" \n\0 blanks at both ends \0\n "
    for value in (every_byte, b"", blank, "grün", "gru\u0308n", b"last"):
        writer.set("key", value)
        _expect(reader.get("key"), value.encode() if isinstance(value, str) else value, f"get after set({value!r})")


def keys_are_any_text(open_store: OpenStore) -> None:
    """Check that keys are different if one character differs. Keys may be empty, or long, and contain any character."""
    writer, reader = open_store(), open_store()
    keys = ["", " ", "a", "A", " a", "a ", "a/b", "a//b", "../a", ".", "..", "*", "a,b", "a\\", "%61"]
    keys += ["schlüssel", "schlu\u0308ssel", "鍵"]
    keys += [f"a{chr(code)}{end}" for code in (*range(32), 127) for end in ("", "b")]
    keys += ["k" * 1000, "k" * 999 + "l", "k" * 999]
    for separator in " ,;/\n\0":  # with which a store might write a list of keys
        writer.set("a", "1")
        writer.set("b", "1")
        call = partial(reader.wait, [f"a{separator}b"], SHORT_S)
        _expect_timeout(call, SHORT_S, f"{call}, with keys 'a' and 'b' in the store")
        writer.delete_key("a")
        writer.delete_key("b")
    for key in keys:
        _expect(reader.check([key]), False, f"check([{key!r}]), with other keys in the store")
        writer.set(key, f"value of {key}")
        _expect(reader.check([key]), True, f"check([{key!r}]) after set")
    for key in keys:
        _expect(reader.get(key), f"value of {key}".encode(), f"get({key!r})")
    _expect(reader.check(keys), True, "check of all these keys")
    reader.wait(keys, LONG_S)
    for number, key in enumerate(keys):
        _expect(writer.add(f"{key}#", number), number, f"add to the absent key {key + '#'!r}")
        _expect(writer.compare_set(key, f"value of {key}", "new"), b"new", f"compare_set({key!r}, ...)")
        _expect(writer.delete_key(key), True, f"delete_key({key!r})")
        _expect(reader.check([key]), False, f"check([{key!r}]) after delete_key")


def a_megabyte_fits(open_store: OpenStore) -> None:
    """Check a value of 1 MiB, which is larger than a network packet."""
    value = bytes(i * i % 251 for i in range(2**20))
    open_store().set("large", value)
    _expect(open_store().get("large") == value, True, "a value of 1 MiB comes back as it was")


def add_counts_in_decimal_text(open_store: OpenStore) -> None:
    """Check `add` for a missing key, for a number that `set` wrote, and for negative sums. `get` must return decimal text."""
    one, other = open_store(), open_store()
    _expect(one.add("count", 5), 5, "add to an absent key")
    _expect(other.add("count", -7), -2, "add through another handle")
    _expect(one.add("count", 0), -2, "add of nothing")
    _expect(other.get("count"), b"-2", "get after add")
    _expect(one.compare_set("count", "-2", "40"), b"40", "compare_set of a sum")
    _expect(other.add("count", 2), 42, "add to what compare_set wrote")
    one.set("count", "50")
    _expect(other.add("count", 2), 52, "add to what set wrote")
    for key, number in (("big", 2**63 - 1), ("small", -(2**63))):  # a floating-point number has not enough digits
        _expect(one.add(key, number), number, f"add of {number}")
        _expect(other.get(key), str(number).encode(), f"get after add of {number}")


def add_of_more_than_64_bits_is_refused_and_changes_nothing(open_store: OpenStore) -> None:
    """Check that `add` refuses an amount that does not fit into 64 bits, and that the store works afterwards."""
    store = open_store()
    store.add("count", 3)
    for amount in (2**63, -(2**64), 10**25):
        _expect_error(InvalidArgumentError, partial(store.add, "count", amount), f"add of {amount}")
    _expect(open_store().add("count", 1), 4, "the sum after the refused add")


def add_to_text_is_refused_and_changes_nothing(open_store: OpenStore) -> None:
    """Check that `add` raises an error if the value is not a number, and does not change the value."""
    store = open_store()
    store.set("text", "not a number")
    _expect_error(SynclineError, lambda: store.add("text", 1), "add to a text")
    _expect(open_store().get("text"), b"not a number", "the text after the refused add")


def check_asks_for_all_keys_and_does_not_wait(open_store: OpenStore) -> None:
    """Check that `check` returns whether every key exists, and does not wait. Without keys, `wait` does not wait either."""
    store = open_store()
    store.set_timeout(3600)
    _expect(store.check(["a"]), False, "check of an absent key")
    store.set("a", "")
    _expect(open_store().check(["a"]), True, "check of an empty value")
    _expect(store.check(["a", "b"]), False, "check of a present and an absent key")
    store.set("b", "1")
    _expect(store.check(["a", "b"]), True, "check of two present keys")
    _expect(store.check([]), True, "check of no keys")
    store.wait([], SHORT_S)


def compare_set_answers_as_torch_does(open_store: OpenStore) -> None:
    """Check all cases of `compare_set`."""
    store, reader = open_store(), open_store()
    _expect(store.compare_set("key", "guess", "new"), b"guess", "absent key, some value expected: the expectation")
    _expect(reader.check(["key"]), False, "nothing was stored by that")
    _expect(store.compare_set("key", "", "first"), b"first", "absent key, nothing expected: stored")
    _expect(reader.get("key"), b"first", "the value after that")
    _expect(store.compare_set("key", b"first", b"\xff\x00"), b"\xff\x00", "the expected value: stored")
    _expect(reader.get("key"), b"\xff\x00", "the value after that")
    _expect(store.compare_set("key", "first", "third"), b"\xff\x00", "another value: what is there")
    _expect(store.compare_set("key", "", "third"), b"\xff\x00", "nothing expected but something there: what is there")
    _expect(reader.get("key"), b"\xff\x00", "the value after both")
    _expect(store.compare_set("key", b"\xff\x00", ""), b"", "the expected value, replaced by an empty value: stored")
    _expect(reader.check(["key"]), True, "a key with an empty value is there")
    _expect(store.compare_set("key", "guess", "new"), b"", "empty value, some value expected: what is there")
    _expect(reader.get("key"), b"", "the value after that")
    _expect(store.compare_set("key", "", "new"), b"new", "empty value, nothing expected: stored")
    _expect(reader.get("key"), b"new", "the value after that")
    _expect(store.compare_set("other", "", ""), b"", "absent key, nothing expected, an empty value: stored")
    _expect(reader.check(["other"]), True, "the key after that")


def delete_key_says_whether_it_was_there(open_store: OpenStore) -> None:
    """Check that a deleted key is gone for every handle, and can be made again by each call that makes a key."""
    store, other = open_store(), open_store()
    makes: tuple[tuple[str, Callable[[], object]], ...] = (
        ("set", partial(store.set, "a", "7")),
        ("add", partial(store.add, "a", 7)),
        ("compare_set", partial(store.compare_set, "a", "", "7")),
    )
    for name, make in makes:
        _expect(store.delete_key("a"), False, "delete of an absent key")
        make()
        store.wait(["a"])
        _expect(store.check(["a"]), True, f"check after {name}")
        _expect(store.get("a"), b"7", f"get after {name}")
        _expect(other.delete_key("a"), True, f"delete after {name}")
        _expect(store.check(["a"]), False, "check after delete")
        _expect_timeout(partial(store.get, "a", SHORT_S), SHORT_S, "get after delete")
        _expect_timeout(partial(store.wait, ["a"], SHORT_S), SHORT_S, "wait after delete")


def num_keys_counts_the_keys(open_store: OpenStore) -> None:
    """Check that `num_keys` counts each key once, and that a call that only looks at a key does not make the key."""
    store, other = open_store(), open_store()
    before = store.num_keys()
    store.set("a", "1")
    store.add("b", 1)
    store.compare_set("c", "", "1")
    _expect(other.num_keys() - before, 3, "keys more after three were made")
    store.set("a", "2")
    store.add("b", 1)
    store.compare_set("c", "1", "2")
    _expect(other.num_keys() - before, 3, "keys more after three were changed")
    store.check(["absent"])
    store.compare_set("absent", "guess", "1")
    store.delete_key("absent")
    for call in (partial(store.get, "absent", SHORT_S), partial(store.wait, ["absent"], SHORT_S)):
        _expect_timeout(call, SHORT_S, f"{call}")
    _expect(other.num_keys() - before, 3, "keys more after calls for an absent key")
    store.delete_key("b")
    _expect(other.num_keys() - before, 2, "keys more after delete")


def a_key_that_never_comes_is_named(open_store: OpenStore) -> None:
    """Check that `get` and `wait` end with an error that names the missing keys and the time limit.

    The error must be an instance of Python's `TimeoutError`, and also of Syncline's `TransportError`.
    """
    store = open_store()
    store.set("here", "1")
    for limit in (SHORT_S, timedelta(seconds=SHORT_S)):
        for names, call in (
            (["never"], partial(store.get, "never", limit)),
            (["never", "missing"], partial(store.wait, ["never", "here", "missing"], limit)),
        ):
            error = _expect_timeout(call, SHORT_S, f"a wait for keys that never come, {call}")
            _expect(isinstance(error, TimeoutError) and isinstance(error, TransportError), True, "it is of both families")
            named = [name for name in ("never", "here", "missing") if f"{name}'" in str(error)]
            _expect(named, names, f"the keys that {error!s} names")
            _expect("0.05 s" in str(error), True, f"{error!s} names the limit")
    _expect(store.get("here"), b"1", "the handle works after that")


def the_limit_of_the_handle_is_honoured(open_store: OpenStore) -> None:
    """Check that `set_timeout` sets the time limit of `get` and `wait`, in seconds or as a timedelta."""
    store, writer = open_store(), open_store()
    for limit in (SHORT_S, timedelta(seconds=SHORT_S)):
        store.set_timeout(limit)
        _expect(store.timeout, timedelta(seconds=SHORT_S), "the timeout property")
        _expect_timeout(lambda: store.get("never"), SHORT_S, "get, with a limit of the handle")
        _expect_timeout(lambda: store.wait(["never"]), SHORT_S, "wait, with a limit of the handle")
    for wrong in (0, -1, float("nan")):
        for call in (store.set_timeout, partial(store.get, "never"), partial(store.wait, ["never"])):
            _expect_error(InvalidArgumentError, partial(call, wrong), f"{call} with the limit {wrong}")
    _expect(store.timeout, timedelta(seconds=SHORT_S), "the timeout property after that")
    endless = float("inf")
    waiting: list[Future[Any]] = [_start(partial(store.get, "late", endless)), _start(partial(store.wait, ["late"], endless))]
    store.set_timeout(endless)
    waiting += [_start(partial(store.get, "late")), _start(partial(store.wait, ["late"]))]
    _some_time_passes(writer)
    writer.set("late", "1")
    _expect([_result(one) for one in waiting], [b"1", None] * 2, "what calls without an end return")


def the_limit_of_a_call_comes_before_that_of_the_handle(open_store: OpenStore) -> None:
    """Check that a time limit of one call replaces the handle's limit."""
    patient, hasty, writer = open_store(), open_store(), open_store()
    patient.set_timeout(SHORT_S)
    waiting = _start(partial(patient.wait, ["late"], LONG_S))
    getting = _start(partial(patient.get, "late", LONG_S))
    _expect_timeout(lambda: hasty.wait(["never"], 4 * SHORT_S), 4 * SHORT_S, "a short limit of a call")
    writer.set("late", "1")
    _result(waiting)
    _expect(_result(getting), b"1", "what the patient call returns")


def a_wait_ends_when_the_last_key_comes(open_store: OpenStore) -> None:
    """Check that `get`, and a `wait` for several keys, end when the last key is made, by whichever call."""
    waiter, writer = open_store(), open_store()
    makes: dict[str, Callable[[str], object]] = {
        "set": lambda key: writer.set(key, "1"),
        "add": lambda key: writer.add(key, 1),
        "compare_set": lambda key: writer.compare_set(key, "", "1"),
    }
    for name, make in makes.items():
        keys = [f"{name} {letter}" for letter in "abc"]
        waiting: list[Future[Any]] = [_start(partial(waiter.wait, keys, LONG_S)), _start(partial(waiter.get, keys[1], LONG_S))]
        for key in (keys[2], "other", keys[0]):
            writer.set(key, "1")
        _some_time_passes(writer)
        _expect([one.done() for one in waiting], [False, False], "whether the calls ended before the last key")
        start_s = time.monotonic()
        make(keys[1])
        _expect([_result(one) for one in waiting], [None, b"1"], f"what the calls return after {name}")
        _expect(time.monotonic() - start_s < LATE_S, True, f"the calls end within {LATE_S:g} s after {name}")


def one_that_waits_holds_up_nobody(open_store: OpenStore) -> None:
    """Check that a waiting call blocks no other handle, and no other thread of the same handle."""
    store, other = open_store(), open_store()
    getting = [_start(partial(store.get, f"gate {i}", LONG_S)) for i in range(THREADS)]
    waiting = [_start(partial(store.wait, [f"gate {i}"], LONG_S)) for i in range(THREADS)]
    start_s = time.monotonic()
    for handle in (other, store):
        handle.set("key", "1")
        _expect(handle.get("key"), b"1", "get of another key while others wait")
        handle.wait(["key"])
        _expect(handle.add("count", 1) > 0, True, "a change while others wait")
        _expect(handle.compare_set("key", "1", "2"), b"2", "a swap while others wait")
        _expect(handle.check(["key"]), True, "a look while others wait")
        _expect(handle.num_keys() > 0, True, "a count while others wait")
        _expect(handle.delete_key("key"), True, "a delete while others wait")
    _expect(time.monotonic() - start_s < LATE_S, True, f"all these calls end within {LATE_S:g} s while others wait")
    for i in range(THREADS):
        store.set(f"gate {i}", str(i))
    _expect([_result(one) for one in getting], [str(i).encode() for i in range(THREADS)], "what the waiting calls return")
    for one in waiting:
        _result(one)


def every_add_counts_once(open_store: OpenStore) -> None:
    """Check that concurrent calls of `add` never return the same sum."""

    def count(_: int) -> list[int]:
        store = open_store()
        return [store.add("count", 1) for _ in range(ROUNDS)]

    sums = [total for totals in _in_threads(count) for total in totals]
    _expect(sorted(sums), list(range(1, THREADS * ROUNDS + 1)), "the sums that all threads saw")


def threads_may_share_a_handle(open_store: OpenStore) -> None:
    """Check that threads can share a handle: no `add` is lost or counted twice."""
    store = open_store()

    def use(rank: int) -> list[int]:
        sums: list[int] = []
        for _ in range(ROUNDS):
            sums.append(store.add("count", 1))
            _expect(int(store.get("count")) >= sums[-1], True, "the count is not below what this thread made it")
            _expect(store.check([f"own {rank}"]), len(sums) > 1, "whether this thread's own key is there")
            store.set(f"own {rank}", b"")
        return sums

    sums = [total for totals in _in_threads(use) for total in totals]
    _expect(sorted(sums), list(range(1, THREADS * ROUNDS + 1)), "the sums that all threads saw")


def compare_set_lets_one_win(open_store: OpenStore) -> None:
    """Check threads that count up with `compare_set`: for each number, exactly one thread must succeed."""

    def advance(rank: int) -> list[int]:
        store = open_store()
        won: list[int] = []
        while len(won) < ROUNDS // 3:
            old = store.get("steps")
            step = int(old.split()[0]) + 1
            new = f"{step} by {rank}".encode()
            if store.compare_set("steps", old, new) == new:
                won.append(step)
        return won

    open_store().set("steps", "0 by nobody")
    steps = [step for won in _in_threads(advance) for step in won]
    _expect(sorted(steps), list(range(1, THREADS * (ROUNDS // 3) + 1)), "the steps that all threads won")


def all_meet_all(open_store: OpenStore) -> None:
    """Check rounds in which every thread sets one key, and waits for the keys of all threads."""

    def meet(rank: int) -> list[list[bytes]]:
        store = open_store()
        seen: list[list[bytes]] = []
        for turn in range(3):
            store.set(f"{turn}/{rank}", f"{turn}:{rank}")
            store.wait([f"{turn}/{other}" for other in range(THREADS)], LONG_S)
            seen.append([store.get(f"{turn}/{other}") for other in range(THREADS)])
        return seen

    expected = [[f"{turn}:{rank}".encode() for rank in range(THREADS)] for turn in range(3)]
    for rank, seen in enumerate(_in_threads(meet)):
        _expect(seen, expected, f"what thread {rank} saw")


def a_clone_has_a_limit_of_its_own(open_store: OpenStore) -> None:
    """Check that a clone has the same keys, and its own time limit."""
    store = open_store()
    store.set_timeout(LONG_S)
    clone = store.clone()
    before = store.timeout
    _expect(clone.timeout, before, "the limit of a new clone")
    clone.set_timeout(SHORT_S)
    _expect(store.timeout, before, "the limit of the handle that was cloned")
    store.set("key", "1")
    _expect(clone.get("key"), b"1", "get through the clone")
    _expect_timeout(lambda: clone.get("never"), SHORT_S, "get of a key that never comes, through the clone")
    clone.close()


def wrong_arguments_are_refused(open_store: OpenStore) -> None:
    """Check that wrong arguments are refused.

    The wrong arguments are one key in place of a list, keys and values that are numbers or a lone surrogate, bytes as a key,
    and a float as an amount.
    """
    store = open_store()
    unchecked: Any = store  # as in a caller's code without types
    lone = "\udc80"
    calls: list[partial[Any]] = [
        partial(store.check, "abc"),
        partial(store.wait, "abc", SHORT_S),
        partial(unchecked.add, "key", 1.5),
    ]
    for key in (lone, b"key", 3, None):
        calls += [
            partial(unchecked.set, key, "1"),
            partial(unchecked.get, key, SHORT_S),
            partial(unchecked.add, key, 1),
            partial(unchecked.check, [key]),
            partial(unchecked.wait, [key], SHORT_S),
            partial(unchecked.compare_set, key, "", "1"),
            partial(unchecked.delete_key, key),
        ]
    for value in (lone, 3, None):
        calls += [
            partial(unchecked.set, "key", value),
            partial(unchecked.compare_set, "key", value, "1"),
            partial(unchecked.compare_set, "key", "", value),
        ]
    for call in calls:
        _expect_error(InvalidArgumentError, call, f"{call}")
    _expect(store.check(["key"]), False, "nothing was stored by that")


_CHECKS: tuple[StoreCheck, ...] = (
    values_are_bytes_and_the_last_one_counts,
    keys_are_any_text,
    a_megabyte_fits,
    add_counts_in_decimal_text,
    add_of_more_than_64_bits_is_refused_and_changes_nothing,
    add_to_text_is_refused_and_changes_nothing,
    check_asks_for_all_keys_and_does_not_wait,
    compare_set_answers_as_torch_does,
    delete_key_says_whether_it_was_there,
    num_keys_counts_the_keys,
    a_key_that_never_comes_is_named,
    the_limit_of_the_handle_is_honoured,
    the_limit_of_a_call_comes_before_that_of_the_handle,
    a_wait_ends_when_the_last_key_comes,
    one_that_waits_holds_up_nobody,
    every_add_counts_once,
    threads_may_share_a_handle,
    compare_set_lets_one_win,
    all_meet_all,
    a_clone_has_a_limit_of_its_own,
    wrong_arguments_are_refused,
)


def _limited(check: StoreCheck) -> StoreCheck:
    """Return the check with a time limit, because a faulty store may wait for ever. Each error becomes an AssertionError."""

    @functools.wraps(check)
    def limited(open_store: OpenStore) -> None:
        thread, ended = _in_thread(partial(check, open_store))
        if not wait_for([ended], CHECK_S).done:
            stack = traceback.extract_stack(sys._current_frames().get(thread.ident or 0))
            call = next((frame.line for frame in stack if frame.name == check.__name__), "")
            details = "".join(stack.format())
            raise AssertionError(f"{check.__name__} still waits after {CHECK_S:g} s, in the line `{call}`\n{details}")
        error = ended.exception()
        if isinstance(error, Exception) and not isinstance(error, AssertionError):
            raise AssertionError(f"{check.__name__}: a call of the store raised {type(error).__name__}: {error}") from error
        ended.result()

    return limited


STORE_CHECKS: tuple[StoreCheck, ...] = tuple(map(_limited, _CHECKS))
"""All checks. Give each check a new, empty store."""


def _expect(found: object, expected: object, what: str) -> None:
    # The type, because a bytearray equals bytes, and 1 equals True.
    if found != expected or type(found) is not type(expected):
        raise AssertionError(f"{what}: expected {expected!r}, found {found!r}")


def _expect_error(kind: type[BaseException], call: Callable[[], object], what: str) -> BaseException:
    try:
        found = call()
    except kind as error:
        return error
    raise AssertionError(f"{what}: expected {kind.__name__}, but it returned {found!r}")


def _expect_timeout(call: Callable[[], object], limit_s: float, what: str) -> BaseException:
    """Check that `call` raises a `StoreTimeout` at its time limit: not earlier, and not much later."""
    start_s = time.monotonic()
    error = _expect_error(StoreTimeout, call, what)
    took_s = time.monotonic() - start_s
    # Clocks are not exact.
    if not 0.9 * limit_s <= took_s <= limit_s + LATE_S:
        raise AssertionError(f"{what}: expected an end after {limit_s:g} s, its time limit; found {took_s:.2g} s")
    return error


def _some_time_passes(store: Store) -> None:
    _expect_timeout(lambda: store.wait(["never"], 2 * SHORT_S), 2 * SHORT_S, "some time passes")


def _in_thread(body: Callable[[], Result]) -> tuple[threading.Thread, Future[Result]]:
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(body())
        except BaseException as error:  # noqa: BLE001 - the thread that asks for the result raises it
            future.set_exception(error)

    # A daemon, because Python waits for other threads at its end, and a faulty store may never return.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, future


def _start(body: Callable[[], Result]) -> Future[Result]:
    return _in_thread(body)[1]


def _result(future: Future[Result]) -> Result:
    if not wait_for([future], LONG_S).done:
        raise AssertionError(f"a call in another thread still waits after {LONG_S:g} s")
    return future.result()


def _in_threads(body: Callable[[int], Result]) -> list[Result]:
    start = threading.Barrier(THREADS)

    def run(rank: int) -> Result:
        start.wait(LONG_S)
        return body(rank)

    return [_result(one) for one in [_start(partial(run, rank)) for rank in range(THREADS)]]
