"""Registering, and what is wrong with a set-up, in one process without a launcher."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from syncline.collectives import (
    BackendUnavailableError,
    GroupClosedError,
    InvalidArgumentError,
    LaunchError,
    MisuseError,
    NotInitializedError,
    TorchGroup,
    TransportError,
    as_process_group,
    destroy_process_group,
    get_default_group,
    init_process_group,
)
from syncline.collectives.internal import replace_default_group
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.startup.launch import detect_launch
from syncline.collectives.testing.processes import run_processes
from syncline.collectives.torch_backend import TorchProcessGroup, monitored_barrier, register, share_default_group
from syncline.collectives.torch_bridge import call_issuer, group_factory, registration, rendezvous
from syncline.collectives.transports.threads import create_groups

pytestmark = pytest.mark.skipif(detect_launch(os.environ) is not None, reason="about processes that nothing launched")


@pytest.fixture(autouse=True)
def _destroyed() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def init(backend: str = "syncline") -> TorchProcessGroup:
    dist.init_process_group(backend, init_method="mpi://")
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, TorchProcessGroup)
    return group


def test_torch_knows_the_names() -> None:
    for name in ("syncline", "syncline-mpi", "syncline-nccl"):
        assert dist.is_backend_available(name)
    assert dist.get_default_backend_for_device("cpu") == "gloo", "torch's own defaults stay"


def test_registering_twice_is_harmless() -> None:
    before = dict(dist.Backend._plugins)
    register()
    importlib.reload(registration)
    assert dict(dist.Backend._plugins) == before


def test_another_package_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend._plugins, "SYNCLINE", dist.Backend._BackendPlugin(pytest.fail, True))
    with pytest.raises(MisuseError, match=r"backend 'syncline' of torch\.distributed was registered by _pytest"):
        register()


def test_another_package_has_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers, "mpi", pytest.fail)
    with pytest.raises(MisuseError, match="rendezvous scheme 'mpi://'"):
        register()


@pytest.mark.parametrize(
    ("count", "devices", "claimed"),
    [(0, ["cpu", "cuda"], ["cpu"]), (2, ["cpu", "cuda"], ["cpu", "cuda"]), (0, ["cuda"], ["cuda"])],
)
def test_only_devices_that_are_there_are_claimed(
    count: int, devices: list[str], claimed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert registration.devices_there(devices) == claimed


def test_the_backends_claim_what_this_machine_has() -> None:
    there = ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]
    assert dist.Backend.backend_capability["syncline-mpi"] == dist.Backend.backend_capability["syncline"] == there


@pytest.mark.parametrize("version", ["2.6.0", "2.10.0+cpu", "3.0.0a0"])
def test_new_enough(version: str) -> None:
    registration.check_torch(version, is_available=True)


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0+cu117"])
def test_too_old(version: str) -> None:
    with pytest.raises(BackendUnavailableError, match=rf"needs torch 2\.6 or later, found (torch )?{version[:5]}"):
        registration.check_torch(version, is_available=True)


def test_torch_without_distributed() -> None:
    with pytest.raises(BackendUnavailableError, match="this build of torch has no"):
        registration.check_torch("2.13.0", is_available=False)


def test_alone() -> None:
    group = init()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "syncline")
    assert group.syncline_group.backend_name == "in_process"
    tensor = torch.arange(3.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    monitored_barrier()


def test_the_adapter_unwraps() -> None:
    group = init()
    assert as_process_group(group) is group.syncline_group
    theirs = dist.new_group([0], backend="gloo")
    wrapped = as_process_group(theirs)
    assert isinstance(wrapped, TorchGroup)
    assert wrapped.torch_group is theirs


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 4), (1, -1), (0, 2)])
def test_more_ranks_than_there_are(rank: int, world_size: int) -> None:
    with pytest.raises(LaunchError, match=rf"rank={rank} and world_size={world_size}, but nothing launched this process"):
        dist.init_process_group("syncline", init_method="mpi://", rank=rank, world_size=world_size)


def test_the_scheme_takes_nothing_more() -> None:
    with pytest.raises(InvalidArgumentError, match="expected 'mpi://' and nothing after it"):
        dist.init_process_group("syncline", init_method="mpi://somewhere:1234")


def test_torchrun_is_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(LaunchError, match="needs mpirun, mpiexec or srun, but torchrun started this process; use 'env://'"):
        next(rendezvous.rendezvous("mpi://"))


def test_a_backend_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend._plugins, "SYNCLINE-NCCL", _plugin("smoke"))
    with pytest.raises(BackendUnavailableError, match="stands on our backend 'smoke': unknown backend"):
        init("syncline-nccl")


def _plugin(backend: str):
    creator = dist.Backend._plugins["SYNCLINE-NCCL"].creator_fn
    function = creator.func
    return dist.Backend._BackendPlugin(
        lambda options, pg_options: function("syncline-nccl", backend, ["cuda"], options, pg_options), True
    )


def test_ranks_that_meet_elsewhere(tmp_path: Path) -> None:
    """Without a launcher, by another rendezvous of torch's: our Gloo uses its store. Then torch shares a group of ours."""
    run_processes(Path(__file__).with_name("meeting_job.py"), 2, tmp_path)


def test_our_default_group_cannot_be_torchs_before_there_is_one_or_beside_another() -> None:
    with pytest.raises(NotInitializedError):
        share_default_group()
    init_process_group()
    try:
        init()
        with pytest.raises(MisuseError, match=r"torch\.distributed is initialised already; call it before, or leave it out"):
            share_default_group()
        dist.destroy_process_group()
        share_default_group()
        assert as_process_group(dist.group.WORLD) is get_default_group()
    finally:
        destroy_process_group()


def test_torch_gets_our_new_default_group_after_a_loss_and_with_a_newcomer(tmp_path: Path) -> None:
    run_processes(Path(__file__).with_name("renewing_job.py"), 4, tmp_path, killed=frozenset({2}))


@pytest.mark.parametrize("moment", ["before torch's group is destroyed", "after it is destroyed"])
def test_torch_gets_the_next_default_group_if_a_rank_is_lost_before_torch_has_the_new_one(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def loses(*_: object, **__: object) -> None:
        raise TransportError("rank 1 is lost")

    (failed,), (last,) = create_groups(1), create_groups(1)
    first = init_process_group()
    try:
        share_default_group()
        with monkeypatch.context() as patch:
            if moment == "after it is destroyed":
                patch.setattr(dist, "init_process_group", loses)
            else:
                patch.setattr(group_factory, "store_over", loses)
            with pytest.raises(TransportError):
                replace_default_group(first, failed)
        assert replace_default_group(failed, last)
        assert as_process_group(dist.group.WORLD) is get_default_group() is last
    finally:
        destroy_process_group()
        first.close()


def test_a_script_that_destroys_torchs_group_or_makes_its_own_keeps_that_after_a_change() -> None:
    (second,), (third,) = create_groups(1), create_groups(1)
    first = init_process_group()
    try:
        share_default_group()
        dist.destroy_process_group()
        replace_default_group(first, second)
        assert not dist.is_initialized()
        own = init()
        replace_default_group(second, third)
        assert dist.group.WORLD is own
    finally:
        destroy_process_group()
        first.close()


def test_an_error_after_changes_of_the_group_has_the_rank_only_once(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("failed", file=sys.stderr))
    (second,) = create_groups(1)
    first = init_process_group()
    try:
        share_default_group()
        replace_default_group(first, second)
        sys.excepthook(ValueError, ValueError(), None)
        assert capsys.readouterr().err.strip() == "[rank0]: failed"
    finally:
        destroy_process_group()
        first.close()


def test_the_wrong_device() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'cuda:syncline' was asked for, but this backend .* moves tensors on cpu"):
        init("cuda:syncline")


def test_a_tensor_on_the_wrong_device() -> None:
    init()
    with pytest.raises(InvalidArgumentError, match="moves tensors on cpu, found a tensor on meta"):
        dist.all_reduce(torch.ones(3, device="meta"))


def test_options_that_would_be_ignored() -> None:
    with pytest.raises(InvalidArgumentError, match="'syncline' has no options, found 7"):
        dist.init_process_group("syncline", init_method="mpi://", pg_options=7)


def test_a_group_of_some_ranks_needs_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.collectives.torch_bridge import group_factory

    with pytest.raises(LaunchError, match=r"new_group\(\[1, 3\], backend='syncline'\): first make a group of all ranks"):
        group_factory._root("syncline", [1, 3])


def test_what_torch_asks_a_backend() -> None:
    group = init()
    face = group._get_backend(torch.device("cpu"))
    assert (face.name(), face.rank(), face.size()) == ("syncline", 0, 1)
    assert face.options._timeout.total_seconds() == 1800
    with pytest.raises(RuntimeError, match="backend 'syncline' serves tensors on cpu, not on cuda"):
        group._get_backend(torch.device("cuda"))


def test_forms_without_options() -> None:
    """Of torch's methods, which its own functions do not use."""
    group, tensor = init(), torch.arange(3.0)
    group.allreduce(tensor, dist.ReduceOp.MAX, timedelta(seconds=5)).wait()
    group.allreduce([tensor], op=dist.ReduceOp.SUM).wait()
    group.broadcast(tensor, 0).wait()
    group.reduce(tensor, 0, dist.ReduceOp.MIN).wait()
    rows = [torch.zeros(3)]
    group.allgather(rows, tensor, timedelta(seconds=5)).wait()
    group.gather(rows, tensor, 0).wait()
    group.scatter(tensor, rows, 0).wait()
    group.reduce_scatter(tensor, rows, dist.ReduceOp.AVG).wait()
    group.barrier(timedelta(seconds=5)).wait()
    assert tensor.tolist() == rows[0].tolist() == [0.0, 1.0, 2.0]


def test_our_group_ends_with_torchs() -> None:
    from syncline.collectives import GroupClosedError
    from syncline.collectives.torch_bridge.group_factory import _everybody

    ours = init().syncline_group
    dist.destroy_process_group()
    assert "syncline" not in _everybody
    with pytest.raises(GroupClosedError):
        ours.barrier()


def test_several_tensors_are_reduced_together() -> None:
    group = init()
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    group.allreduce([first, AsyncCollectiveTensor(second)]).wait()
    assert (first.tolist(), second.tolist()) == ([11.0, 22.0], [11.0, 22.0])
    with pytest.raises(InvalidArgumentError, match="alike in shape and dtype"):
        group.allreduce([torch.ones(1), torch.ones(2)])
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match="its storage was freed"):
        group.allreduce([first, freed])
    with pytest.raises(InvalidArgumentError, match="does not scale, found AVG"):
        group.allreduce([first, second], op=dist.ReduceOp.AVG)


def test_empty_lists_and_wrong_roots_are_refused() -> None:
    group = init()
    with pytest.raises(InvalidArgumentError, match="at least one tensor, found an empty list"):
        group.allreduce([])
    for call, options in ((group.broadcast, dist.BroadcastOptions()), (group.reduce, dist.ReduceOptions())):
        options.rootTensor = 1
        with pytest.raises(InvalidArgumentError, match=r"expected rootTensor in 0\.\.0, found 1"):
            call([torch.ones(1)], options)


@pytest.mark.parametrize("splits", [np.array([3]), np.array([], dtype=np.int64), [], (3,)], ids=repr)
def test_splits_are_lists_or_arrays_and_empty_splits_mean_equal_numbers(splits: Any) -> None:
    init()
    output = torch.zeros(3)
    dist.all_to_all_single(output, torch.arange(3.0), splits, splits)
    assert output.tolist() == [0.0, 1.0, 2.0]


def test_groups_have_sequence_numbers() -> None:
    group = init()
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 2


def test_integers_are_averaged_and_bools_are_summed() -> None:
    init()
    mean, either = torch.tensor([-3, 4]), torch.tensor([True, False])
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.all_reduce(either)
    assert (mean.tolist(), either.tolist()) == ([-3, 4], [True, False])


def test_torchs_profiler_shows_each_collective_once() -> None:
    init()
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(2, 3))
        dist.broadcast(torch.ones(4), 0, async_op=True).wait()
    events = [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith("syncline")]
    assert [event for event in events if event[1]] == [("syncline:all_reduce", [[2, 3]]), ("syncline:broadcast", [[4]])]


def test_the_sites_settings_hold_under_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site.toml"
    site.write_text("stall_warning_s = 5\nring_bytes = 4096\nreproducible = true\n")
    monkeypatch.setenv("SYNCLINE_SITE", str(site))
    monkeypatch.setenv("SYNCLINE_EAGER_BYTES", "100")
    requests: list[ConnectRequest] = []

    class Asked:
        meets_in_store = True

        def connect(self, request: ConnectRequest) -> None:
            requests.append(request)

    monkeypatch.setattr(group_factory, "load_backend", lambda _: Asked())
    group_factory._connect("syncline", "in_process", SimpleNamespace(group_rank=0, group_size=1, store=None), 7.0)
    (request,) = requests
    assert (request.stall_warning_s, request.reproducible, request.timeout_s) == (5, True, 7.0)
    assert (request.thresholds.ring_bytes, request.thresholds.eager_bytes) == (4096, 100)


def test_torchs_end_reaches_our_groups_where_torch_ends_those_of_nccl_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6."""
    others: list[object] = []
    monkeypatch.setattr(dist.distributed_c10d, "_shutdown_backend", others.append, raising=False)
    registration._close_when_torch_destroys()
    registration._close_when_torch_destroys()  # registering twice is harmless
    group, shut_down = init(), dist.distributed_c10d._shutdown_backend
    shut_down("a group of torch's")
    assert others == ["a group of torch's"]
    shut_down(group)
    assert others == ["a group of torch's"]
    with pytest.raises(GroupClosedError):
        group.syncline_group.barrier()


def test_works_that_only_cpp_holds_live_until_they_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.6, where C++ would wait for ever for one whose Python half is gone."""
    monkeypatch.setattr(call_issuer, "LOSES_WORKS", True)
    monkeypatch.setattr(call_issuer, "_UNASKED_KEPT", 3)
    group = init()

    def issue() -> weakref.ref[dist.Work]:
        return weakref.ref(group.allreduce([torch.ones(2)]))

    works = [issue() for _ in range(4)]
    gc.collect()
    assert [work() is not None for work in works] == [False, True, True, True]
    asked = works[1]()
    assert asked is not None
    asked.wait()
    group._kept.clear()
    del asked
    gc.collect()
    assert [work() is not None for work in works] == [False, False, True, True]
