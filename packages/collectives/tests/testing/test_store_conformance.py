"""The public checks of a store notice stores with one deliberate fault each."""

from __future__ import annotations

import os.path
import threading
import time
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from syncline.collectives import StoreTimeout
from syncline.collectives.engine.cancel_scope import seconds
from syncline.collectives.stores import InMemoryStore
from syncline.collectives.testing import store_conformance
from syncline.collectives.testing.store_conformance import STORE_CHECKS

#: Takes the right method, bound to the store, and its arguments.
Fault = Callable[..., Any]
_CHECKS = {check.__name__: check for check in STORE_CHECKS}


def other_keys(change: Callable[[str], str]) -> dict[str, Fault]:
    """Change the key in all methods."""

    def changed(key: Any) -> Any:
        return change(key) if isinstance(key, str) else key

    def of_key(right: Fault, key: Any, *arguments: Any) -> Any:
        return right(changed(key), *arguments)

    def of_keys(right: Fault, keys: Any, *arguments: Any) -> Any:
        return right(keys if isinstance(keys, str) else list(map(changed, keys)), *arguments)

    return dict.fromkeys(("set", "get", "add", "compare_set", "delete_key"), of_key) | dict.fromkeys(("check", "wait"), of_keys)


def other_values(change: Callable[[bytes], Any]) -> dict[str, Fault]:
    return {"get": lambda right, *arguments: change(right(*arguments))}


def other_limit(change: Callable[[float], float]) -> dict[str, Fault]:
    """Change the time limit of `get` and `wait`."""

    def fault(right: Any, name: Any, timeout: Any = None) -> Any:
        return right(name, change(seconds(timeout, right.__self__.timeout.total_seconds())))

    return {"get": fault, "wait": fault}


def waits_first(right: Any, keys: Any) -> bool:
    right.__self__.wait(keys)
    return right(keys)


def loses_the_empty_key(right: Fault, key: str, *arguments: Any) -> Any:
    return right(key, *arguments) if key != "" else None


def swaps_no_empty_value(right: Any, key: str, expected: Any, desired: Any) -> bytes:
    store = right.__self__
    return b"" if store.check([key]) and store.get(key) == b"" else right(key, expected, desired)


def takes_nothing_for_anything(right: Any, key: str, expected: Any, desired: Any) -> bytes:
    store = right.__self__
    return right(key, store.get(key) if store.check([key]) and not expected else expected, desired)


def wait_needs_a_key(right: Fault, keys: Any, *arguments: Any) -> None:
    right(keys or ["any"], *arguments)


def waits_for_the_first(right: Fault, keys: Any, *arguments: Any) -> None:
    right(keys[:1] if isinstance(keys, list) else keys, *arguments)


def silently(right: Any, *arguments: Any) -> Any:
    """Change the table without waking those that wait."""
    changed = right.__self__._table.changed
    changed.notify_all = lambda: None
    try:
        return right(*arguments)
    finally:
        del changed.notify_all


def one_at_a_time(right: Any, *arguments: Any) -> Any:
    """Let no call begin while another one waits."""
    with right.__self__._table.__dict__.setdefault("lock", threading.Lock()):
        return right(*arguments)


def keeps_its_lock_after_an_error(right: Any, *arguments: Any) -> Any:
    lock = right.__self__._table.__dict__.setdefault("lock", threading.Lock())
    lock.acquire()
    answer = right(*arguments)
    lock.release()
    return answer


def makes_absent_keys(right: Any, name: Any, *arguments: Any) -> Any:
    try:
        return right(name, *arguments)
    except StoreTimeout:
        right.__self__.set("made by a get", "")
        raise


def remembers(right: Any, keys: Any, *arguments: Any) -> Any:
    """Ask once for each key."""
    known = right.__self__.__dict__.setdefault("known", set())
    if isinstance(keys, list) and set(keys) <= known:
        return True
    answer = right(keys, *arguments)
    if answer is not False:
        known.update(keys)
    return answer


def adds_in_two_calls(right: Any, key: str, amount: Any) -> int:
    store = right.__self__
    number = int(store.get(key)) if store.check([key]) else 0
    time.sleep(0)
    store.set(key, str(number + amount))
    return number + amount


def swaps_in_two_calls(right: Any, key: str, expected: Any, desired: Any) -> bytes:
    store = right.__self__
    if store.get(key) != expected:
        return store.get(key)
    time.sleep(0)
    store.set(key, desired)
    return desired


def takes_numbers(right: Fault, key: str, value: Any, *others: Any) -> Any:
    return right(key, str(value) if isinstance(value, int) else value, *others)


def in_floats(right: Fault, key: str, amount: Any) -> int:
    return int(float(right(key, amount)))


def counts_no_sums(right: Any) -> int:
    return len(right.__self__._table.values) - ("b" in right.__self__._table.values)


def takes_wrong_limits(right: Fault, name: Any, timeout: Any = None) -> Any:
    return right(name, timeout if timeout is None or hasattr(timeout, "days") or timeout > 0 else None)


def takes_no_infinity(right: Any, name: Any, timeout: Any = None) -> Any:
    if timeout == float("inf"):
        raise OverflowError("timestamp too large")
    return right(name, timeout)


def is_the_handle(right: Any) -> Any:
    return right.__self__


ANY_TEXT, WAKES = "keys_are_any_text", "a_wait_ends_when_the_last_key_comes"
BLOCKS, WRONG = "one_that_waits_holds_up_nobody", "wrong_arguments_are_refused"
VALUES, LIMIT = "values_are_bytes_and_the_last_one_counts", "the_limit_of_the_handle_is_honoured"
#: What is wrong in which methods, and which check must see it.
FAULTS: dict[str, tuple[dict[str, Fault], str]] = {
    "keys end at a newline": (other_keys(lambda key: key.partition("\n")[0]), ANY_TEXT),
    "keys end at a NUL": (other_keys(lambda key: key.partition("\0")[0]), ANY_TEXT),
    "keys lose their blanks": (other_keys(str.strip), ANY_TEXT),
    "keys of one case": (other_keys(str.lower), ANY_TEXT),
    "keys are paths": (other_keys(os.path.normpath), ANY_TEXT),
    "keys are normalized": (other_keys(partial(unicodedata.normalize, "NFC")), ANY_TEXT),
    "keys of 255 characters": (other_keys(lambda key: key[:255]), ANY_TEXT),
    "the empty key is lost": ({"set": loses_the_empty_key}, ANY_TEXT),
    "wait cuts keys": ({"wait": other_keys(lambda key: key.partition(",")[0])["wait"]}, ANY_TEXT),
    "add cuts keys": ({"add": other_keys(lambda key: key.partition("\n")[0])["add"]}, ANY_TEXT),
    "delete_key cuts keys": ({"delete_key": other_keys(lambda key: key.partition("\n")[0])["delete_key"]}, ANY_TEXT),
    "values lose their blanks": (other_values(bytes.strip), VALUES),
    "values end at a NUL": (other_values(lambda value: value.partition(b"\0")[0]), VALUES),
    "values may change": (other_values(bytearray), VALUES),
    "values of 64 KiB": (other_values(lambda value: value[: 2**16]), "a_megabyte_fits"),
    "values are text": (other_values(bytes.decode), "add_counts_in_decimal_text"),
    "sums are floats": ({"add": in_floats}, "add_counts_in_decimal_text"),
    "an error keeps the lock": (
        {"add": keeps_its_lock_after_an_error, "get": keeps_its_lock_after_an_error},
        "add_to_text_is_refused_and_changes_nothing",
    ),
    "check waits": ({"check": waits_first}, "check_asks_for_all_keys_and_does_not_wait"),
    "wait for no key": ({"wait": wait_needs_a_key}, "check_asks_for_all_keys_and_does_not_wait"),
    "an empty value is not swapped": ({"compare_set": swaps_no_empty_value}, "compare_set_answers_as_torch_does"),
    "nothing expected means anything": ({"compare_set": takes_nothing_for_anything}, "compare_set_answers_as_torch_does"),
    "check remembers": ({"check": remembers}, "delete_key_says_whether_it_was_there"),
    "wait remembers": ({"wait": remembers}, "delete_key_says_whether_it_was_there"),
    "sums are not counted": ({"num_keys": counts_no_sums}, "num_keys_counts_the_keys"),
    "get makes the key": ({"get": makes_absent_keys}, "num_keys_counts_the_keys"),
    "wait makes the key": ({"wait": makes_absent_keys}, "num_keys_counts_the_keys"),
    "a limit is too long": (other_limit(lambda limit_s: limit_s + 1), LIMIT),
    "a limit is too short": (other_limit(lambda limit_s: limit_s / 2), LIMIT),
    "no limit": (other_limit(lambda _: 3600), "a_key_that_never_comes_is_named"),
    "a wrong limit is none": ({"get": takes_wrong_limits}, LIMIT),
    "no end is an error": ({"wait": takes_no_infinity}, LIMIT),
    "one key of several": ({"wait": waits_for_the_first}, WAKES),
    "set wakes nobody": ({"set": silently}, WAKES),
    "add wakes nobody": ({"add": silently}, WAKES),
    "compare_set wakes nobody": ({"compare_set": silently}, WAKES),
    "a waiting get blocks set": ({"get": one_at_a_time, "set": one_at_a_time}, BLOCKS),
    "a waiting wait blocks delete_key": ({"wait": one_at_a_time, "delete_key": one_at_a_time}, BLOCKS),
    "a waiting wait blocks compare_set": ({"wait": one_at_a_time, "compare_set": one_at_a_time}, BLOCKS),
    "add is not atomic": ({"add": adds_in_two_calls}, "every_add_counts_once"),
    "compare_set is not atomic": ({"compare_set": swaps_in_two_calls}, "compare_set_lets_one_win"),
    "numbers as values": ({"set": takes_numbers}, WRONG),
    "swaps numbers": ({"compare_set": takes_numbers}, WRONG),
    "bytes as keys": ({"get": lambda right, key, *others: right(key if isinstance(key, str) else "", *others)}, WRONG),
    "a clone is the handle": ({"clone": is_the_handle}, "a_clone_has_a_limit_of_its_own"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checks_see(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_conformance, "LATE_S", 0.5)
    monkeypatch.setattr(store_conformance, "LONG_S", 1)
    monkeypatch.setattr(store_conformance, "CHECK_S", 2)
    wrongs, check = FAULTS[fault]

    def method(name: str) -> Fault:
        return lambda self, *arguments: wrongs[name](getattr(super(Faulty, self), name), *arguments)

    Faulty = type("Faulty", (InMemoryStore,), {name: method(name) for name in wrongs})  # noqa: N806 - a class
    store = Faulty()
    with pytest.raises(AssertionError, match=rf"expected .* (found|returned)|{check} still waits|a call of the store raised"):
        _CHECKS[check](store.clone)


def test_a_check_that_hangs_names_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_conformance, "CHECK_S", 0.5)

    class Endless(InMemoryStore):
        def wait(self, keys, timeout=None):
            threading.Event().wait()

    with pytest.raises(AssertionError, match=r"(?s)still waits after 0.5 s, in the line `store.wait\(.*in wait\n"):
        _CHECKS["check_asks_for_all_keys_and_does_not_wait"](Endless().clone)
