from __future__ import annotations

import copy
import os
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from syncline import collectives
from syncline.collectives import (
    InvalidArgumentError,
    LaunchError,
    MisuseError,
    NotInitializedError,
    UnknownBackendError,
    destroy_process_group,
    get_default_group,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)
from syncline.collectives.engine.observers import observe_calls
from syncline.collectives.transports.threads import create_groups

LAUNCHED = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def nobody_launched_this(monkeypatch: pytest.MonkeyPatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK", "SYNCLINE_BACKEND", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    yield
    destroy_process_group()


CALLS = {
    "all_reduce": lambda: collectives.all_reduce(torch.ones(1)),
    "broadcast": lambda: collectives.broadcast(torch.ones(1), 0),
    "all_gather": lambda: collectives.all_gather([torch.ones(1)], torch.ones(1)),
    "barrier": collectives.barrier,
    "get_rank": get_rank,
    "get_world_size": get_world_size,
    "get_default_group": get_default_group,
}


def test_a_job_of_torchrun_that_is_one_of_several_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHED, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "left over"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SYNCLINE_PLACE", "")
    with pytest.warns(UserWarning, match="OMPI_COMM_WORLD_SIZE=2, so there may be 2 trainings that do not know of each other"):
        init_process_group()
    assert get_world_size() == 1


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_before_init_and_after_destroy(call) -> None:
    with pytest.raises(NotInitializedError, match=r"init_process_group\(\) first \(and not after destroy"):
        call()
    init_process_group()
    call()
    destroy_process_group()
    with pytest.raises(NotInitializedError):
        call()


def test_alone() -> None:
    assert not is_initialized()
    group = init_process_group(timeout=timedelta(seconds=9))
    assert is_initialized()
    assert get_default_group() is group
    assert (group.backend_name, get_rank(), get_world_size(), group.timeout_s) == ("in_process", 0, 1, 9.0)


def test_init_twice_is_refused_and_the_first_stays() -> None:
    group = init_process_group()
    with pytest.raises(MisuseError, match=r"was called before and made .*call destroy_process_group first"):
        init_process_group()
    assert get_default_group() is group


def test_destroy_twice_is_fine_and_init_after_it_too() -> None:
    first = init_process_group()
    destroy_process_group()
    destroy_process_group()
    assert init_process_group() is not first


def test_a_failed_init_leaves_no_group() -> None:
    with pytest.raises(UnknownBackendError):
        init_process_group("smoke")
    with pytest.raises(InvalidArgumentError):
        init_process_group(timeout=0)
    assert not is_initialized()


def test_backend_by_argument_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert init_process_group("gloo").backend_name == "gloo"
    destroy_process_group()
    monkeypatch.setenv("SYNCLINE_BACKEND", "gloo")
    assert init_process_group().backend_name == "gloo"


def test_contradicting_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="world_size=3 was asked for, but Open MPI says 2"):
        init_process_group("gloo", world_size=3)
    with pytest.raises(LaunchError, match="rank=0 was asked for, but Open MPI says 1"):
        init_process_group("gloo", world_size=2, rank=0)
    with pytest.raises(LaunchError, match="this job has 2 processes"):
        init_process_group("in_process")


def test_world_size_without_a_rank() -> None:
    with pytest.raises(LaunchError, match="world_size=2 was given without a rank"):
        init_process_group("gloo", world_size=2)


def test_a_rank_without_a_world_size() -> None:
    with pytest.raises(LaunchError, match="rank=1 was given without a world_size, and nothing launched this process"):
        init_process_group("gloo", rank=1)
    assert init_process_group("gloo", rank=0).size == 1


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_integers_of_other_libraries_are_ranks_and_sizes(kind, scheme: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"file://{tmp_path}/meeting" if scheme == "file" else f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    group = init_process_group("gloo", url, 20, rank=kind(0), world_size=kind(1))
    assert (type(group.rank), type(group.size)) == (int, int)


def test_no_way_to_meet() -> None:
    with pytest.raises(LaunchError, match="2 ranks and no way for them to meet: pass init_method='file:///shared/folder'"):
        init_process_group("gloo", world_size=2, rank=0)


def test_logs_its_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="syncline.collectives"):
        init_process_group()
    assert len(caplog.records) == 2
    assert f"rank 0 of 1: host {socket.gethostname()}, pid {os.getpid()}" in caplog.text
    assert "1 rank(s) over in_process" in caplog.text
    assert "nothing launched this process" in caplog.text


def test_functions_return_work_only_if_async() -> None:
    init_process_group()
    tensor = torch.ones(2)
    outputs = [torch.empty(2)]
    for call in (
        lambda **how: collectives.all_reduce(tensor, **how),
        lambda **how: collectives.broadcast(tensor, 0, **how),
        lambda **how: collectives.all_gather(outputs, tensor, **how),
        lambda **how: collectives.barrier(**how),
    ):
        assert call() is None
        work = call(async_op=True)
        assert work is not None
        assert work.wait()


@pytest.mark.parametrize("call", [collectives.all_reduce, partial(collectives.reduce, dst=0)])
def test_reductions_of_torch_are_taken(call) -> None:
    init_process_group()
    tensor = torch.ones(2)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        call(tensor, op=getattr(dist.ReduceOp, name))
    call(tensor, op=dist._make_nccl_premul_sum(0.5))
    assert tensor.tolist() == [0.5, 0.5]
    collectives.reduce_scatter_tensor(tensor, torch.ones(2), op=dist.ReduceOp.SUM)
    collectives.reduce_scatter(tensor, [torch.ones(2)], op=dist.ReduceOp.MAX)
    collectives.all_reduce_coalesced([tensor], op=dist.ReduceOp.SUM)
    sparse = tensor.to_sparse()
    collectives.all_reduce(sparse, op=dist.ReduceOp.SUM)
    with pytest.raises(InvalidArgumentError, match=r"a reduction of syncline or of torch\.distributed \(SUM"):
        call(tensor, op="sum")


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda tensor: collectives.all_gather(None, tensor), "outputs to be a list of tensors, found NoneType"),
        (lambda tensor: collectives.reduce_scatter(tensor, None), "inputs to be a list of tensors, found NoneType"),
        (lambda tensor: collectives.all_to_all(None, None), "outputs to be a list of tensors, found NoneType"),
        (lambda tensor: collectives.all_to_all([tensor], []), "1 input tensors, one for each rank, found 0"),
        (lambda tensor: collectives.all_gather([1], tensor), "outputs to be a list of tensors, found int at index 0"),
        (lambda tensor: collectives.all_gather(tensor, tensor), "outputs to be a list of tensors, found Tensor"),
        (lambda tensor: collectives.all_gather([tensor], 1.0), "tensor to be a torch.Tensor, found float"),
        (lambda tensor: collectives.all_gather_into_tensor([tensor], tensor), "output to be a torch.Tensor, found list"),
        (lambda tensor: collectives.gather(tensor, ["a"], dst=0), "outputs to be a list of tensors, found str at index 0"),
        (lambda tensor: collectives.scatter(tensor, [None], src=0), "inputs to be a list of tensors, found NoneType"),
        (lambda tensor: collectives.reduce_scatter(tensor, [2]), "inputs to be a list of tensors, found int"),
        (lambda tensor: collectives.reduce_scatter_tensor(tensor, 2), "tensor to be a torch.Tensor, found int"),
        (lambda tensor: collectives.all_to_all([tensor], [2]), "inputs to be a list of tensors, found int"),
        (lambda tensor: collectives.all_to_all_single(2, tensor), "output to be a torch.Tensor, found int"),
        (lambda tensor: collectives.all_reduce_coalesced([tensor, 2]), "tensors to be a list of tensors, found int at index 1"),
        (lambda tensor: collectives.all_reduce_coalesced(None), "tensors to be a list of tensors, found NoneType"),
        (lambda tensor: collectives.all_reduce_coalesced([tensor.to_sparse()]), "dense tensors, .* found a sparse one"),
        (lambda tensor: collectives.broadcast_coalesced([tensor.to_sparse()]), "dense tensors, .* found a sparse one"),
        (lambda tensor: collectives.broadcast_coalesced(None), "tensors to be a list of tensors, found NoneType"),
        (lambda tensor: collectives.all_gather_coalesced([[tensor]], [tensor.to_sparse()]), "dense tensors"),
        (lambda tensor: collectives.all_gather_coalesced([None], [tensor]), "tensors to be a list of tensors, found NoneType"),
    ],
)
def test_what_is_no_tensor_is_refused_in_our_words(call, found: str) -> None:
    init_process_group()
    with pytest.raises(InvalidArgumentError, match=f"rank 0 of 1 .*expected {found}"):
        call(torch.ones(1))


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda tensor: collectives.broadcast(tensor, torch.tensor(0.0)), r"expected a rank, found tensor\(0\.\)"),
        (lambda tensor: collectives.broadcast(tensor, group_src=np.zeros(2)), "expected a rank, found array"),
        (lambda tensor: get_default_group().broadcast(tensor, torch.tensor(0.0)), "expected a root in 0..0"),
        (lambda tensor: get_default_group().split(torch.tensor(0.0)), "expected a color of 0 or above"),
        (lambda tensor: collectives.all_reduce(tensor, group=tensor), "expected a ProcessGroup .* found Tensor"),
        (lambda tensor: collectives.all_reduce(tensor, op=[]), "expected a reduction"),
        (lambda tensor: collectives.premul_sum(None), "expected a finite factor for premul_sum, found None"),
        (lambda tensor: collectives.new_group("x"), "expected a list of ranks, found 'x'"),
        (lambda tensor: collectives.new_group(3), "expected a list of ranks, found 3"),
        (lambda tensor: collectives.new_subgroups(tensor), "expected a group_size that divides"),
        (lambda tensor: collectives.new_subgroups(torch.tensor(1.0)), "expected a group_size that divides"),
        (lambda tensor: collectives.new_subgroups_by_enumeration(None), "expected a list of lists of ranks, found None"),
        (lambda tensor: collectives.new_subgroups_by_enumeration([0]), "expected a list of ranks, found 0"),
        (lambda tensor: collectives.all_gather_object(None, 1), "expected a list of objects, found NoneType"),
        (lambda tensor: collectives.broadcast_object_list("x", 0), "expected a list of objects, found str"),
        (lambda tensor: collectives.batch_isend_irecv([{}]), "expected a list of P2POps"),
        (lambda tensor: collectives.adasum_coalesced([None]), "expected tensors to be a list of tensors"),
        (
            lambda tensor: collectives.adasum_coalesced([tensor, tensor.to("meta"), tensor.double()]),
            "dtype on one device, found torch.float32 on cpu, torch.float32 on meta and 1 more; call it once for each",
        ),
        (lambda tensor: collectives.adasum_coalesced([tensor.int()]), "floating-point .* found torch.int32 on cpu; convert"),
        (lambda tensor: collectives.all_gather_rows(None), "expected tensors to be a list of tensors"),
        (lambda tensor: collectives.broadcast_copy(None, 0), "expected tensor to be a torch.Tensor, found NoneType"),
        (lambda tensor: collectives.all_gather_coalesced(None, []), "expected a list of tensors for each rank"),
        (lambda tensor: get_default_group().set_timeout([1]), "a timeout must be a positive number"),
        (lambda tensor: get_default_group().set_timeout("5"), "a timeout must be a positive number"),
        (lambda tensor: collectives.new_group([0], timeout=0), "a timeout must be a positive number"),
        (lambda tensor: collectives.new_subgroups(1, timeout="x"), "a timeout must be a positive number"),
        (lambda tensor: collectives.new_subgroups_by_enumeration([[0]], timeout=-1), "a timeout must be a positive number"),
        (lambda tensor: collectives.premul_sum(10**400), "expected a finite factor"),
        (lambda tensor: collectives.all_reduce(tensor, op=([],)), "expected a reduction"),
        (lambda tensor: collectives.broadcast(tensor, torch.empty((), device="meta")), "expected a rank"),
        (lambda tensor: collectives.scatter_object_list([None], "a", 0), "expected a list of objects, found str"),
        (lambda tensor: collectives.all_to_all_rows(tensor, [2.5]), "expected a list of integers as splits"),
    ],
)
def test_arguments_of_another_type_are_refused_and_do_no_harm(call, found: str) -> None:
    init_process_group()
    tensor = torch.ones(2)
    issued = []
    stop = observe_calls(lambda group, *_: issued.append(group))
    with pytest.raises(InvalidArgumentError, match=found):
        call(tensor)
    stop()
    assert not issued, "another rank would have waited for the rest of this call"
    collectives.all_reduce(tensor)  # the group still works


@pytest.mark.parametrize("arguments", [{"rank": "0", "world_size": 1}, {"rank": 0, "world_size": "1"}])
def test_ranks_and_sizes_as_text_are_refused(arguments) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected an int as (rank|world_size), found str '\d'"):
        init_process_group(**arguments)


@pytest.mark.parametrize("timeout", [float("inf"), timedelta.max])
def test_a_group_without_a_time_limit(timeout: timedelta | float, tmp_path: Path) -> None:
    init_process_group("gloo", f"file://{tmp_path}/meeting", timeout=timeout, world_size=1, rank=0)
    assert collectives.all_reduce(torch.ones(2), group=collectives.new_group([0], timeout), async_op=True).wait()


def test_arrays_of_ranks_are_taken() -> None:
    init_process_group()
    assert collectives.new_group(np.array([0])).size == 1
    assert collectives.new_subgroups_by_enumeration(np.array([[0]]))[1] == [[0]]
    assert collectives.all_to_all_rows(torch.ones(2), np.array([2]))[1] == [2]
    assert len(collectives.all_reduce_copy_coalesced(torch.nn.ParameterList([torch.ones(2)]))) == 1


def test_nothing_coalesced_is_nothing_to_do() -> None:
    init_process_group()
    collectives.broadcast_coalesced([])
    collectives.all_reduce_coalesced([])
    collectives.all_gather_coalesced([[]], [])


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_copy_of_a_group_is_refused_with_the_remedy(copied: Callable[[object], object]) -> None:
    for group in create_groups(2):
        # A TypeError, as for other objects that cannot be pickled: programs that test this expect one.
        words = rf"rank {group.rank} of 2 .* cannot be copied or pickled: save the state_dict"
        with pytest.raises(TypeError, match=words) as caught:
            copied({"the state of a hook": group} if copied is not copy.copy else group)
        assert isinstance(caught.value, MisuseError)


def test_ranks_on_the_node() -> None:
    init_process_group()
    assert (collectives.get_local_rank(), collectives.get_node_rank()) == (0, 0)
    assert collectives.__version__ == version("syncline-collectives")


def test_functions_take_a_group() -> None:
    groups = create_groups(2)
    try:
        assert get_rank(groups[1]) == 1
        assert get_world_size(groups[1]) == 2
    finally:
        for group in groups:
            group.close()
