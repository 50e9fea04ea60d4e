"""What only the file store promises: fresh runs, survival of torn writes and of killed writers, clear errors."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from syncline.collectives import DisagreementError, InvalidArgumentError, StoreError, StoreTimeout, StoreUnavailableError
from syncline.collectives.stores import FileStore, file_rendezvous, join_latest_run
from syncline.collectives.stores.file import leave_run, rendezvous
from syncline.collectives.stores.file.folder import Folder, LinkLock
from syncline.collectives.stores.file.store import Log, decode, encode


def test_a_run_never_reads_another(tmp_path: Path) -> None:
    FileStore(tmp_path, "job-1.step-0").set("address", "of the earlier run")
    fresh = FileStore(tmp_path, "job-2.step-0")
    assert not fresh.check(["address"])
    assert fresh.num_keys() == 0


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "-rf", "a b", "x" * 201])
def test_a_run_id_must_be_a_folder_name(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InvalidArgumentError, match="run_id"):
        FileStore(tmp_path / "inside", run_id)
    assert not (tmp_path / "inside").exists()


def test_an_unwritable_path_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file", Path("/proc")):  # the second can be written by nobody, root included
        with pytest.raises(StoreUnavailableError, match=rf"file store {path}/run cannot be opened.*expected a folder"):
            FileStore(path, "run", timeout=3600)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_error_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreUnavailableError, match="Permission denied"):
        FileStore(tmp_path, "run")


def test_a_file_system_without_hard_links_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreUnavailableError, match="hard links"):
        FileStore(tmp_path, "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    FileStore(tmp_path / "new", "run").set("key", "1")
    assert (tmp_path / "new" / "run").stat().st_mode & 0o077 == 0
    assert (tmp_path / "new" / "run" / "log").stat().st_mode & 0o077 == 0


def test_every_folder_that_is_made_is_for_its_owner_only(tmp_path: Path) -> None:
    FileStore(tmp_path / "above" / "new", "run")
    for folder in ("above", "above/new", "above/new/run"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("reach", [lambda path: FileStore(path, "rendezvous"), lambda path: file_rendezvous(path, 0, 1)])
def test_a_link_in_place_of_the_log_is_not_followed(tmp_path: Path, reach: Callable[[Path], object]) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_bytes(encode("key", b"1") + b"what would be cut off as a torn record")
    before = treasure.read_bytes()
    (tmp_path / "meeting" / "rendezvous").mkdir(parents=True, mode=0o700)
    (tmp_path / "meeting" / "rendezvous" / "log").symlink_to(treasure)
    with pytest.raises(StoreUnavailableError, match=r"rendezvous/log is not used: it is a symbolic link.*Give another folder"):
        reach(tmp_path / "meeting")
    assert treasure.read_bytes() == before


def test_a_link_that_comes_later_is_not_followed_either(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "run")
    treasure = tmp_path / "treasure"
    treasure.write_bytes(b"not to be cut off")
    log = tmp_path / "run" / "log"
    log.unlink()
    log.symlink_to(treasure)
    for call in (lambda: store.set("key", "1"), lambda: store.check(["key"])):
        with pytest.raises(StoreError, match="run/log is not used: it is a symbolic link"):
            call()
    assert treasure.read_bytes() == b"not to be cut off"


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir(mode=0o700)
    (tmp_path / "project" / "log").write_bytes(b"of another program")
    (tmp_path / "run").symlink_to(tmp_path / "project")
    with pytest.raises(StoreUnavailableError, match="run is not used: it is a symbolic link"):
        FileStore(tmp_path, "run")
    (tmp_path / "run").unlink()
    store = FileStore(tmp_path, "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").symlink_to(tmp_path / "project")
    with pytest.raises(StoreError, match="run is not used: it is a symbolic link"):
        store.set("key", "1")
    assert (tmp_path / "project" / "log").read_bytes() == b"of another program"


def test_a_link_above_the_folder_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "far away").mkdir()
    (tmp_path / "scratch").symlink_to(tmp_path / "far away")
    FileStore(tmp_path / "scratch", "run").set("key", "1")
    assert (tmp_path / "far away" / "run" / "log").exists()


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("name", ["run", "run/log"])
def test_what_others_can_write_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    store = FileStore(tmp_path, "run")
    path = tmp_path / name
    path.chmod(path.stat().st_mode | mode)
    refusal = rf"{path} is not used: others can write it \(mode .*run `chmod go-w {path}`"
    with pytest.raises(StoreUnavailableError, match=refusal):
        FileStore(tmp_path, "run")
    for call in (lambda: store.set("key", "1"), lambda: store.check(["key"])):
        with pytest.raises(StoreError, match=refusal):
            call()
    path.chmod(path.stat().st_mode & ~mode)
    store.set("key", "1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give something away")
@pytest.mark.parametrize("name", ["run", "run/log"])
def test_what_belongs_to_somebody_else_is_refused(tmp_path: Path, name: str) -> None:
    store = FileStore(tmp_path, "run")
    os.chown(tmp_path / name, 12345, -1)
    refusal = rf"{tmp_path / name} is not used: it belongs to user 12345, and this process is user 0"
    with pytest.raises(StoreUnavailableError, match=refusal):
        FileStore(tmp_path, "run")
    with pytest.raises(StoreError, match=refusal):
        store.check(["key"])


def test_a_pipe_in_place_of_the_log_holds_up_nobody(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "run" / "log", 0o600)
    with pytest.raises(StoreUnavailableError, match="run/log is not used: it is no regular file"):
        FileStore(tmp_path, "run")


def test_the_name_of_a_locks_holder_may_be_anything(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "run", timeout=0.05)
    (tmp_path / "run" / "lock").write_bytes(b"\xff\xfe" * 1000)
    with pytest.raises(StoreTimeout, match=r"delete .*/run/lock"):
        store.set("key", "2")


def sealed(body: bytes) -> bytes:
    """A record with a right length and checksum, whatever is in it."""
    return struct.pack(">II", len(body), zlib.crc32(body)) + body


BAD_RECORDS = {
    "a key that is not UTF-8": sealed(struct.pack(">?I", True, 2) + b"\xff\xfe" + b"1"),
    "a key longer than its record": sealed(struct.pack(">?I", True, 100) + b"key"),
}


@pytest.mark.parametrize("record", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_a_record_that_is_not_ours_is_an_error_that_names_the_file(tmp_path: Path, record: bytes) -> None:
    store = FileStore(tmp_path, "run", timeout=3600)
    with open(tmp_path / "run" / "log", "ab") as file:
        file.write(record)
    late = FileStore(tmp_path, "run", timeout=3600)
    for handle in (store, late):
        for call in (
            lambda handle=handle: handle.get("key"),
            lambda handle=handle: handle.check(["key"]),
            lambda handle=handle: handle.set("key", "1"),
        ):
            with pytest.raises(StoreError, match=rf"{tmp_path}/run: the file log holds a record .*Remove the folder"):
                call()


BAD_MEETINGS = {
    "an offer that is no JSON": ("offer", b"{"),
    "an offer that is not UTF-8": ("offer", b"\xff\xfe"),
    "an offer that is a list": ("offer", b"[]"),
    "an offer without a run": ("offer", b'{"joined": {}}'),
    "an offer of a run that is no name": ("offer", b'{"run": "../elsewhere", "joined": {}}'),
    "an offer to a list": ("offer", b'{"run": "run-' + b"0" * 32 + b'", "joined": []}'),
    "an offer without bottom": ("offer", b"[" * 100_000),
    "a number that is not UTF-8": ("join/1", b"\xff\xfe"),
    "a number that is none": ("join/2", b"none"),
}


@pytest.mark.parametrize(("key", "value"), BAD_MEETINGS.values(), ids=BAD_MEETINGS.keys())
def test_a_bad_record_in_the_lobby_is_an_error_on_all_ranks_at_once(tmp_path: Path, key: str, value: bytes) -> None:
    FileStore(tmp_path, "rendezvous").set(key, value)
    with ThreadPoolExecutor(3) as ranks:
        meetings = [ranks.submit(file_rendezvous, tmp_path, rank, 3, timeout=3600) for rank in range(3)]
        for meeting in meetings:
            with pytest.raises(StoreError, match=rf"{tmp_path}/rendezvous: the record '{key}' .*Remove that folder"):
                meeting.result(60)


def meet_in(folder: Path, sizes: dict[int, int]) -> list[Any]:
    """What each of these ranks, who were told these sizes, gets in the folder, or the error that it gets."""

    def body(rank: int) -> Any:
        try:
            return file_rendezvous(folder, rank, sizes[rank], timeout=60)
        except DisagreementError as error:
            return str(error)

    with ThreadPoolExecutor(len(sizes)) as ranks:
        return list(ranks.map(body, sizes))


def runs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("run-"))


@pytest.mark.parametrize("sizes", [{0: 3, 1: 2}, {0: 2, 1: 3}, {0: 2, 2: 3}])
def test_ranks_that_were_told_different_sizes_find_out_at_once(tmp_path: Path, sizes: dict[int, int]) -> None:
    """The last of them is none of the ranks that rank 0 waits for."""
    meet_in(tmp_path, dict.fromkeys(range(4), 4))  # what an earlier run has left says nothing
    other = max(sizes)
    words = f"rank {other} was told that there are {sizes[other]} ranks, and rank 0 that there are {sizes[0]}: pass the same"
    for said in meet_in(tmp_path, sizes):
        assert said.startswith(words)
    assert runs(tmp_path) == [runs(tmp_path)[0]]  # that of the four, which nobody has left


def test_two_processes_of_rank_0_are_told_apart_at_once(tmp_path: Path) -> None:
    """They must not wait for a rank that nobody has."""
    meet_in(tmp_path, dict.fromkeys(range(2), 2))  # what an earlier run has left says nothing
    with ThreadPoolExecutor() as processes:
        for meeting in [processes.submit(file_rendezvous, tmp_path, 0, 2, timeout=600) for _ in range(2)]:
            with pytest.raises(DisagreementError, match="two processes came to this store as rank 0: give each process"):
                meeting.result(60)


def test_a_rank_whose_number_another_process_replaces_does_not_wait(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "rendezvous")
    with ThreadPoolExecutor() as processes:
        meeting = processes.submit(file_rendezvous, tmp_path, 1, 3, timeout=600)
        store.wait(["join/1"], 60)
        store.set("join/1", "0" * 32)
        with pytest.raises(DisagreementError, match="two processes came to this store as rank 1: give each process"):
            meeting.result(60)


def test_an_offer_of_an_earlier_version_says_no_size(tmp_path: Path) -> None:
    FileStore(tmp_path, "rendezvous").set("offer", json.dumps({"run": f"run-{'0' * 32}", "joined": {}}))
    zero, one = meet_in(tmp_path, {0: 2, 1: 2})
    zero.set("from 0", "a")
    assert one.get("from 0") == b"a"


def test_who_leaves_last_takes_the_folder_of_the_run_away(tmp_path: Path) -> None:
    stores = meet_in(tmp_path, dict.fromkeys(range(3), 3))
    late = join_latest_run(tmp_path, timeout=20)
    left = runs(tmp_path)
    assert len(left) == 1
    for store in (*stores[1:], late):
        leave_run(store)
        assert runs(tmp_path) == left, "rank 0 still uses it"
    leave_run(stores[0])
    assert runs(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rendezvous"]


def leave_all(stores: list[Any]) -> None:
    for store in stores:
        leave_run(store)


def test_a_process_that_starts_later_waits_for_the_next_run_if_the_latest_has_ended(tmp_path: Path) -> None:
    leave_all(meet_in(tmp_path, dict.fromkeys(range(2), 2)))
    with pytest.raises(StoreTimeout, match=r"rendezvous: the latest job that met here has ended.* within 0.05 s"):
        join_latest_run(tmp_path, timeout=0.05)
    assert runs(tmp_path) == []
    with ThreadPoolExecutor(1) as other:
        late = other.submit(join_latest_run, tmp_path, timeout=60)
        stores = meet_in(tmp_path, dict.fromkeys(range(2), 2))
        assert late.result(60).folder == stores[0].folder
    leave_all([*stores, late.result()])
    assert runs(tmp_path) == []


def after_the_offer(monkeypatch: pytest.MonkeyPatch, happens: Callable[[bytes], None]) -> None:
    """Let this happen when this thread has read the offer, before it goes on. `happens` gets the offer."""
    get = FileStore.get
    reader = threading.current_thread()

    def read(store: FileStore, key: str, timeout: Any = None) -> bytes:
        value = get(store, key, timeout)
        if key == "offer" and threading.current_thread() is reader:
            happens(value)
        return value

    monkeypatch.setattr(FileStore, "get", read)


def test_a_process_that_starts_later_does_not_join_a_run_that_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = meet_in(tmp_path, dict.fromkeys(range(2), 2))

    def all_leave(_: bytes) -> None:
        leave_all(stores)
        stores.clear()

    after_the_offer(monkeypatch, all_leave)
    with pytest.raises(StoreTimeout, match="the latest job that met here has ended"):
        join_latest_run(tmp_path, timeout=0.05)
    assert runs(tmp_path) == []


def test_a_rank_does_not_join_a_rank_0_that_gives_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as other:
        rank_0 = other.submit(file_rendezvous, tmp_path, 0, 3, timeout=60)

        def rank_0_gives_up(offer: bytes) -> None:
            said = json.loads(offer)
            if "1" in said["joined"]:
                # Rank 2 comes with another world_size.
                FileStore(tmp_path, "rendezvous").set(f"here/{said['run']}/2", "4")
                assert isinstance(rank_0.exception(60), DisagreementError)

        after_the_offer(monkeypatch, rank_0_gives_up)
        with pytest.raises(StoreError, match="rank 0 answered rank 1, and then gave up; look at rank 0's error"):
            file_rendezvous(tmp_path, 1, 3, timeout=60)
    assert runs(tmp_path) == []


def test_a_lock_on_a_full_file_system_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullFile(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_on_full_disk(descriptor: int, *_: object) -> io.StringIO:
        os.close(descriptor)
        return FullFile()

    lock = LinkLock(Folder(tmp_path / "of a job"))
    with monkeypatch.context() as full:
        full.setattr(os, "fdopen", open_on_full_disk)
        with pytest.raises(OSError, match="No space left"), lock.held(1.0):
            pass
    assert os.listdir(tmp_path / "of a job") == []
    with lock.held(1.0):
        pass


@pytest.mark.parametrize("failing", ["opens the store of the run", "says that it is here"])
def test_a_rank_that_fails_while_it_joins_is_no_user_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    joiner, failures = threading.current_thread(), ["once"]

    def fail_once(step: str) -> None:
        if threading.current_thread() is joiner and step == failing and failures:
            failures.pop()
            raise StoreError("the disk is full")

    class FailingStore(FileStore):
        def __init__(self, path: Any, run_id: str, timeout: Any = None) -> None:
            super().__init__(path, run_id, timeout)
            if run_id.startswith("run-"):
                fail_once("opens the store of the run")

        def set(self, key: str, value: bytes | str) -> None:
            if key.startswith("here/"):
                fail_once("says that it is here")
            super().set(key, value)

    monkeypatch.setattr(rendezvous, "FileStore", FailingStore)
    with ThreadPoolExecutor(1) as other:
        rank_0 = other.submit(file_rendezvous, tmp_path, 0, 2, timeout=60)
        with pytest.raises(StoreError, match="the disk is full"):
            file_rendezvous(tmp_path, 1, 2, timeout=60)
        leave_all([file_rendezvous(tmp_path, 1, 2, timeout=60), rank_0.result(60)])
    assert not failures
    assert runs(tmp_path) == []


def test_a_rank_0_that_nobody_joins_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreTimeout):
        file_rendezvous(tmp_path, 0, 2, timeout=0.2)
    assert runs(tmp_path) == []


def test_a_removed_folder_is_explained(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "run")
    shutil.rmtree(tmp_path / "run")
    for call in (lambda: store.set("key", "1"), lambda: store.check(["key"]), lambda: store.get("key")):
        with pytest.raises(StoreError, match="was the folder removed"):
            call()


def test_the_lock_of_a_killed_process_is_named_and_readers_go_on(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "run", timeout=0.05)
    store.set("key", "1")
    (tmp_path / "run" / "lock").write_text("process 123 on node7 since yesterday")
    with pytest.raises(StoreTimeout, match=r"held by process 123 on node7 since yesterday.*delete .*/run/lock"):
        store.set("key", "2")
    assert store.get("key") == b"1"
    (tmp_path / "run" / "lock").unlink()
    store.set("key", "3")
    assert store.get("key") == b"3"


def test_the_lock_excludes(tmp_path: Path) -> None:
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(20):
            with LinkLock(Folder(tmp_path)).held(60):
                inside += 1
                most = max(most, inside)
                (tmp_path / "something").write_text("to do")
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def test_a_lost_answer_to_link_still_means_that_the_lock_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_then_lose_the_answer(*arguments: str, **where: int) -> None:
        link(*arguments, **where)
        raise FileExistsError

    monkeypatch.setattr(os, "link", link_then_lose_the_answer)
    with LinkLock(Folder(tmp_path)).held(1):
        assert (tmp_path / "lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_who_waits_in_vain_does_not_take_the_lock_away(tmp_path: Path) -> None:
    lock = LinkLock(Folder(tmp_path))
    with lock.held(1):
        with pytest.raises(StoreTimeout), lock.held(0.02):
            pass
        assert (tmp_path / "lock").exists()


RECORDS = [("a", b"1"), ("ü", b""), ("a", None), ("", b"\x00\xff" * 50)]


def test_records_survive_encoding() -> None:
    data = b"".join(encode(key, value) for key, value in RECORDS)
    assert decode(data) == (RECORDS, len(data))


def test_a_record_counts_only_when_it_is_whole() -> None:
    first, second = encode("a", b"1"), encode("b", b"22")
    for cut in range(len(second)):
        assert decode(first + second[:cut]) == ([("a", b"1")], len(first))
        zeros = bytes(len(second) - cut)  # a page whose end has not arrived yet
        assert zeros == second[cut:] or decode(first + second[:cut] + zeros)[0] == [("a", b"1")]


def test_a_torn_record_is_waited_for_by_readers_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    writer, reader = Log(Folder(tmp_path)), Log(Folder(tmp_path))
    writer.append("a", b"1")
    next_one, ghost = encode("b", b"2"), encode("ghost", b"part of the torn value that looks like a record")
    torn = encode("torn", b"x" * 1000)[: len(next_one)] + ghost + b"x" * 10
    with open(tmp_path / "log", "ab") as file:
        file.write(torn)
    reader.refresh()
    assert reader.values == {"a": b"1"}
    writer.refresh()
    writer.append("b", b"2")
    reader.refresh()
    late = Log(Folder(tmp_path))
    late.refresh()
    assert reader.values == late.values == {"a": b"1", "b": b"2"}


def test_threads_of_one_handle_take_turns_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, "run")
    turns: list[bool] = []
    for name in ("refresh", "append"):
        method = getattr(store._log, name)
        monkeypatch.setattr(
            store._log, name, lambda *given, method=method: (turns.append(store._log.lock.locked()), method(*given))
        )
    store.set("key", "1")
    store.get("key")
    store.wait(["key"])
    store.num_keys()
    assert turns == [True] * 5


def test_a_change_that_changes_nothing_writes_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "run")
    store.set("key", "1")
    size = (tmp_path / "run" / "log").stat().st_size
    store.set("key", "1")
    store.delete_key("absent")
    store.compare_set("key", "other", "2")
    assert (tmp_path / "run" / "log").stat().st_size == size


def test_a_meeting_names_the_missing_ranks(tmp_path: Path) -> None:
    with pytest.raises(StoreTimeout, match=r"of 3 ranks, \[1, 2\] did not come within 0.05 s"):
        file_rendezvous(tmp_path, 0, 3, timeout=0.05)
    with pytest.raises(StoreTimeout, match="rank 0 did not answer rank 2"):
        file_rendezvous(tmp_path, 2, 3, timeout=0.05)


def test_a_meeting_does_not_believe_leftovers(tmp_path: Path) -> None:
    """Whole runs that broke off at every stage: a joiner alone, a host alone, an offer that was never taken."""
    for rank in (1, 0, 1, 0):
        with pytest.raises(StoreTimeout):
            file_rendezvous(tmp_path, rank, 2, timeout=0.05)
    found: dict[int, FileStore] = {}

    def run(rank: int) -> None:
        found[rank] = file_rendezvous(tmp_path, rank, 2, timeout=60)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0].describe() == found[1].describe()
    assert found[0].num_keys() == 0
    found[0].set("key", "1")
    assert found[1].get("key") == b"1"


def test_a_meeting_of_one_is_over_at_once(tmp_path: Path) -> None:
    assert file_rendezvous(tmp_path, 0, 1).num_keys() == 0


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_meeting_refuses_impossible_ranks(tmp_path: Path, rank: int, size: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"rank={rank}"):
        file_rendezvous(tmp_path, rank, size)


# ---- a process that was killed while it held the lock ----

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from syncline.collectives.stores.file.folder import Folder, LinkLock
with LinkLock(Folder(Path(sys.argv[1]) / "run")).held(5):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_lock_of_a_process_that_ended_here_is_taken_over_by_one_at_a_time(python: list[str], tmp_path: Path) -> None:
    store = FileStore(tmp_path, "run", timeout=20)
    subprocess.run([*python, "-c", KILLED_WHILE_WRITING, str(tmp_path)], check=False)
    assert (tmp_path / "run" / "lock").exists()
    with ThreadPoolExecutor(8) as threads:
        counts = sorted(threads.map(lambda _: store.add("n", 1), range(8)))
    assert counts == list(range(1, 9))
    assert not (tmp_path / "run" / "lock").exists()


def test_the_lock_of_a_process_that_lives_is_not_taken_over(tmp_path: Path) -> None:
    lock = LinkLock(Folder(tmp_path))
    with lock.held(1), pytest.raises(StoreTimeout, match="not free within"), lock.held(0.05):
        pass
