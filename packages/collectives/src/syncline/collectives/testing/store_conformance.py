"""Checks that every `Store` must pass, including a store of another package.

Each check takes a function that opens another handle (a `Store` object) of the same store. The store is empty at first::

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check):
        server = MyServer()
        check(lambda: MyStore(server.address))

If the handle itself holds the keys and values, the function returns the same object each time. A check fails with an
AssertionError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TypeAlias, TypeVar

from ..errors import InvalidArgumentError, StoreTimeout, SynclineError, TransportError
from ..stores import Store

OpenStore: TypeAlias = Callable[[], Store]
StoreCheck: TypeAlias = Callable[[OpenStore], None]
Result = TypeVar("Result")

THREADS = 8
ROUNDS = 15
SHORT_S = 0.05
LONG_S = 30.0


def values_are_bytes_and_the_last_one_counts(open_store: OpenStore) -> None:
    """Check that `set` replaces a value. `get` must return bytes unchanged, and a str as UTF-8 bytes."""
    writer, reader = open_store(), open_store()
    every_byte = bytes(range(256)) * 3
    for value, expected in ((every_byte, every_byte), (b"", b""), ("grün", "grün".encode()), (b"last", b"last")):
        writer.set("key", value)
        _expect(reader.get("key"), expected, f"get after set({value!r})")


def keys_are_any_text(open_store: OpenStore) -> None:
    """Check keys with slashes, spaces, other alphabets and 1000 letters."""
    writer, reader = open_store(), open_store()
    keys = ["a", "a/b", "a//b", "../a", "A", " a ", "schlüssel", "鍵", "k" * 1000]
    for key in keys:
        writer.set(key, f"value of {key}")
    for key in keys:
        _expect(reader.get(key), f"value of {key}".encode(), f"get({key!r})")


def a_megabyte_fits(open_store: OpenStore) -> None:
    """Check a value of 1 MiB, which is larger than a network packet."""
    value = bytes(i * i % 251 for i in range(2**20))
    open_store().set("large", value)
    _expect(open_store().get("large") == value, True, "a value of 1 MiB comes back as it was")


def add_counts_in_decimal_text(open_store: OpenStore) -> None:
    """Check `add` for a missing key, for a number that `set` wrote, and for negative sums. `get` must return a sum as text."""
    one, other = open_store(), open_store()
    _expect(one.add("count", 5), 5, "add to an absent key")
    _expect(other.add("count", -7), -2, "add through another handle")
    _expect(one.add("count", 0), -2, "add of nothing")
    _expect(other.get("count"), b"-2", "get after add")
    one.set("count", "40")
    _expect(other.add("count", 2), 42, "add to what set wrote")
    _expect(one.add("big", 2**62), 2**62, "add of a large number")


def add_of_more_than_64_bits_is_refused_and_changes_nothing(open_store: OpenStore) -> None:
    """Check that `add` refuses an amount that does not fit into 64 bits, and that the store works afterwards."""
    store = open_store()
    store.add("count", 3)
    for amount in (2**63, -(2**64), 10**25):
        _expect_error(SynclineError, partial(store.add, "count", amount), f"add of {amount}")
    _expect(open_store().add("count", 1), 4, "the sum after the refused add")


def add_to_text_is_refused_and_changes_nothing(open_store: OpenStore) -> None:
    """Check that `add` raises an error if the value is not a number, and does not change the value."""
    store = open_store()
    store.set("text", "not a number")
    _expect_error(SynclineError, lambda: store.add("text", 1), "add to a text")
    _expect(open_store().get("text"), b"not a number", "the text after the refused add")


def check_asks_for_all_keys_and_does_not_wait(open_store: OpenStore) -> None:
    """Check that `check` returns whether every key exists, and does not wait."""
    store = open_store()
    store.set_timeout(3600)
    _expect(store.check(["a"]), False, "check of an absent key")
    store.set("a", "")
    _expect(open_store().check(["a"]), True, "check of an empty value")
    _expect(store.check(["a", "b"]), False, "check of a present and an absent key")
    store.set("b", "1")
    _expect(store.check(["a", "b"]), True, "check of two present keys")
    _expect(store.check([]), True, "check of no keys")


def compare_set_answers_as_torch_does(open_store: OpenStore) -> None:
    """Check all five cases of `compare_set`."""
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


def delete_key_says_whether_it_was_there(open_store: OpenStore) -> None:
    """Check that a deleted key is gone for every handle, and can be set again."""
    store, other = open_store(), open_store()
    before = store.num_keys()
    store.set("a", "1")
    store.set("b", "2")
    _expect(other.num_keys() - before, 2, "keys more after two sets")
    store.set("a", "3")
    _expect(other.num_keys() - before, 2, "keys more after one was replaced")
    _expect(other.delete_key("a"), True, "delete of a present key")
    _expect(store.check(["a"]), False, "check after delete")
    _expect(store.num_keys() - before, 1, "keys more after delete")
    _expect(store.delete_key("a"), False, "delete of an absent key")
    store.set("a", "4")
    _expect(other.get("a"), b"4", "get after delete and set")


def a_key_that_never_comes_is_named(open_store: OpenStore) -> None:
    """Check that `get` and `wait` end with an error that names the missing keys and the time limit.

    The error must be an instance of Python's `TimeoutError`, and also of Syncline's `TransportError`.
    """
    store = open_store()
    store.set("here", "1")
    for limit in (SHORT_S, timedelta(seconds=SHORT_S)):
        for call in (partial(store.get, "never", limit), partial(store.wait, ["here", "never"], limit)):
            error = _expect_error(StoreTimeout, call, "a wait for a key that never comes")
            _expect(isinstance(error, TimeoutError) and isinstance(error, TransportError), True, "it is of both families")
            _expect("never'" in str(error) and "here'" not in str(error), True, f"{error!s} names the missing key only")
            _expect("0.05 s" in str(error), True, f"{error!s} names the limit")
    _expect(store.get("here"), b"1", "the handle works after that")


def the_limit_of_the_handle_is_honoured(open_store: OpenStore) -> None:
    """Check that `set_timeout` sets the time limit of `get` and `wait`, in seconds or as a timedelta."""
    store = open_store()
    for limit in (SHORT_S, timedelta(seconds=SHORT_S)):
        store.set_timeout(limit)
        _expect(store.timeout, timedelta(seconds=SHORT_S), "the timeout property")
        _expect_error(StoreTimeout, lambda: store.get("never"), "get")
        _expect_error(StoreTimeout, lambda: store.wait(["never"]), "wait")
    store.set_timeout(float("inf"))
    store.set("there", "1")
    store.wait(["there"])
    for wrong in (0, -1, float("nan")):
        _expect_error(InvalidArgumentError, partial(store.set_timeout, wrong), f"set_timeout({wrong})")


def the_limit_of_a_call_comes_before_that_of_the_handle(open_store: OpenStore) -> None:
    """Check that a time limit of one call replaces the handle's limit."""
    patient, hasty, writer = open_store(), open_store(), open_store()
    patient.set_timeout(SHORT_S)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(patient.wait, ["late"], LONG_S)
        getting = pool.submit(patient.get, "late", LONG_S)
        _expect_error(StoreTimeout, lambda: hasty.wait(["never"], 4 * SHORT_S), "a short limit of a call")
        writer.set("late", "1")
        _result(waiting)
        _expect(_result(getting), b"1", "what the patient call returns")


def a_wait_ends_when_the_last_key_comes(open_store: OpenStore) -> None:
    """Check that a wait for several keys ends when the last key is set."""
    waiter, writer = open_store(), open_store()
    log: list[str] = []

    def wait() -> None:
        waiter.wait(["a", "b", "c"], LONG_S)
        log.append("woken")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        for key in ("c", "other", "a"):
            writer.set(key, "1")
        _expect_error(StoreTimeout, lambda: writer.wait(["never"], 2 * SHORT_S), "some time passes")
        log.append("last key")
        writer.add("b", 1)
        _result(waiting)
    _expect(log, ["last key", "woken"], "the order of things")


def one_that_waits_holds_up_nobody(open_store: OpenStore) -> None:
    """Check that a waiting call blocks no other handle, and no other thread of the same handle."""
    store, other = open_store(), open_store()
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(store.get, f"gate {i}", LONG_S) for i in range(THREADS)]
        for handle in (other, store):
            handle.set("key", "1")
            _expect(handle.add("count", 1) > 0, True, "a change while others wait")
            _expect(handle.check(["key"]), True, "a look while others wait")
        for i in range(THREADS):
            store.set(f"gate {i}", str(i))
        _expect([_result(one) for one in waiting], [str(i).encode() for i in range(THREADS)], "what the waiting calls return")


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
    """Check that exactly one of several threads makes each step of a counter with `compare_set`."""

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
    clone = store.clone()
    before = store.timeout
    clone.set_timeout(SHORT_S)
    _expect(store.timeout, before, "the limit of the handle that was cloned")
    store.set("key", "1")
    _expect(clone.get("key"), b"1", "get through the clone")
    _expect_error(StoreTimeout, lambda: clone.get("never"), "get of a key that never comes, through the clone")
    clone.close()


def wrong_arguments_are_refused(open_store: OpenStore) -> None:
    """Check that wrong arguments are refused.

    The wrong arguments are one key in place of a list, an int as a value, bytes as a key, a float as an amount, and a lone
    surrogate.
    """
    store = open_store()
    _expect_error(InvalidArgumentError, lambda: store.check("abc"), "check('abc')")
    _expect_error(InvalidArgumentError, lambda: store.wait("abc", SHORT_S), "wait('abc')")
    _expect_error(InvalidArgumentError, lambda: store.set("key", 3), "set('key', 3)")  # type: ignore[arg-type]
    _expect_error(InvalidArgumentError, lambda: store.set(b"key", "1"), "set(b'key', ...)")  # type: ignore[arg-type]
    _expect_error(InvalidArgumentError, lambda: store.add("key", 1.5), "add('key', 1.5)")  # type: ignore[arg-type]
    lone = "\udc80"
    for call in (
        partial(store.set, lone, "1"),
        partial(store.set, "key", lone),
        partial(store.get, lone, SHORT_S),
        partial(store.add, lone, 1),
        partial(store.check, [lone]),
        partial(store.wait, [lone], SHORT_S),
        partial(store.compare_set, lone, "", "1"),
        partial(store.delete_key, lone),
    ):
        _expect_error(InvalidArgumentError, call, f"{call} with a surrogate")
    _expect(store.check(["key"]), False, "nothing was stored by that")


STORE_CHECKS: tuple[StoreCheck, ...] = (
    values_are_bytes_and_the_last_one_counts,
    keys_are_any_text,
    a_megabyte_fits,
    add_counts_in_decimal_text,
    add_of_more_than_64_bits_is_refused_and_changes_nothing,
    add_to_text_is_refused_and_changes_nothing,
    check_asks_for_all_keys_and_does_not_wait,
    compare_set_answers_as_torch_does,
    delete_key_says_whether_it_was_there,
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
"""All checks. Give each check a new, empty store."""


def _expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: expected {expected!r}, found {found!r}")


def _expect_error(kind: type[BaseException], call: Callable[[], object], what: str) -> BaseException:
    try:
        found = call()
    except kind as error:
        return error
    raise AssertionError(f"{what}: expected {kind.__name__}, but it returned {found!r}")


def _result(future: Future[Result]) -> Result:
    return future.result(LONG_S)


def _in_threads(body: Callable[[int], Result]) -> list[Result]:
    start = threading.Barrier(THREADS)

    def run(rank: int) -> Result:
        start.wait(LONG_S)
        return body(rank)

    with ThreadPoolExecutor(THREADS) as pool:
        return [_result(one) for one in [pool.submit(run, rank) for rank in range(THREADS)]]
