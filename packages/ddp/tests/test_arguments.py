"""torch's keywords: which there are, what each does, and what those that cannot be meant say."""

from __future__ import annotations

import copy
import inspect
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from syncline.collectives import (
    InvalidArgumentError,
    MisuseError,
    ProcessGroup,
    TorchGroup,
    destroy_process_group,
    init_process_group,
)
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel
from syncline.ddp.arguments import placement
from syncline.reducer import GradBucket

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:broadcast_buffers is deprecated:FutureWarning")]


class WithBuffer(torch.nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(self.layer.weight, value)
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.full((2,), value))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs + self.buffer)  # type: ignore[no-any-return]


def only_rank(body: Any) -> None:
    run_ranks(1, body)


SINCE_TORCH_2_6 = {
    "init_sync",
    "skip_all_reduce_unused_params",
    "bucket_cap_mb_list",
    "batched_grad_copy",
    "forward_sync_buffers",
    "lazy_bucket_allocation",
}


def test_the_signature_is_torchs() -> None:
    """Names, order and defaults, as far as a call can tell."""
    ours = inspect.signature(DistributedDataParallel).parameters
    theirs = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    newer = SINCE_TORCH_2_6 - set(theirs)
    assert [name for name in ours if name not in newer] == list(theirs)
    changed = {"broadcast_buffers"} if "forward_sync_buffers" in newer else set()  # True became None, which means the same
    assert {name: p.default for name, p in ours.items() if name not in newer | changed} == {
        name: p.default for name, p in theirs.items() if name not in changed
    }


def test_lazy_bucket_allocation_saves_nothing_and_says_so() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.warns(UserWarning, match="saves no memory"):
            DistributedDataParallel(WithBuffer(), process_group=group, lazy_bucket_allocation=True)

    only_rank(body)


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (torch.nn.Linear, r"the class Linear: construct it first, Linear\(\.\.\.\)"),
        (lambda x: x, "function"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_module_is_refused(module: Any, found: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"found {found}"):
        DistributedDataParallel(module)


@pytest.mark.parametrize("wrong", ["25", True, [25], torch.ones(1)])
def test_a_size_that_is_no_number_is_refused(wrong: Any) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="expected bucket_cap_mb to be a number of MiB, found"):
            DistributedDataParallel(WithBuffer(), process_group=group, bucket_cap_mb=wrong)
        with pytest.raises(InvalidArgumentError, match="expected bucket_cap_mb_list to be a number of MiB, found"):
            DistributedDataParallel(WithBuffer(), process_group=group, bucket_cap_mb_list=[1, wrong])

    only_rank(body)


def bucket_is_a_number(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]: ...


def bucket_is_a_text(state: object, bucket: str) -> torch.futures.Future[torch.Tensor]: ...


def returns_a_tensor(state: object, bucket: GradBucket) -> torch.Tensor: ...


def annotated_by_ours(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]: ...


def annotated_by_torchs(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]: ...


def annotated_by_any(state: Any, bucket: Any) -> Any: ...


def annotated_by_nothing(state, bucket): ...  # type: ignore[no-untyped-def]


def annotated_by_what_is_not_there(state: object, bucket: Missing) -> Missing: ...  # type: ignore[name-defined]  # noqa: F821


def test_hooks_whose_annotations_contradict_are_refused() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithBuffer(), process_group=group)
        for hook, found in (
            (bucket_is_a_number, "bucket: int"),
            (bucket_is_a_text, "bucket: str"),
            (returns_a_tensor, "found <class 'torch.Tensor'>"),
        ):
            with pytest.raises(InvalidArgumentError, match=found):
                ddp.register_comm_hook(None, hook)  # type: ignore[arg-type]
        for hook in (annotated_by_ours, annotated_by_torchs, annotated_by_any, annotated_by_nothing):
            ddp.register_comm_hook(None, hook)
        ddp.register_comm_hook(None, annotated_by_what_is_not_there)

    only_rank(body)


def test_arguments_may_be_passed_by_position() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithBuffer(), None, None, 0, False, True, group, 1, True)
        assert ddp.process_group is group
        assert ddp.broadcast_buffers is False
        assert ddp.find_unused_parameters is True

    only_rank(body)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dim": 1}, "dim=0, found 1.*Leave dim out"),
        ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]}, "found both"),
        ({"bucket_cap_mb_list": []}, "at least one size"),
        ({"bucket_cap_mb_list": [1, 0]}, "finite bucket_cap_mb_list above 0 MiB, found 0"),
        ({"skip_all_reduce_unused_params": True}, "only with find_unused_parameters=True"),
        (
            {"skip_all_reduce_unused_params": True, "find_unused_parameters": True, "static_graph": True},
            "without static_graph=True",
        ),
        ({"mixed_precision": object()}, "expected mixed_precision to be a MixedPrecision, found object"),
        ({"device_ids": [0]}, r"device_ids=\[0\] and a module on cpu"),
        ({"device_ids": np.array([0])}, r"device_ids=\[.*0.*\] and a module on cpu"),
        ({"output_device": 0}, "output_device without device_ids"),
        ({"process_group": "world"}, "expected a process group.*found str"),
        ({"device_mesh": object()}, "Cannot specify both process_group and device_mesh"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, Any], complaint: str) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match=complaint):
            DistributedDataParallel(WithBuffer(), **{"process_group": group, **arguments})

    only_rank(body)


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            {name: np.bool_(value)}
            for name in (
                "find_unused_parameters",
                "gradient_as_bucket_view",
                "static_graph",
                "forward_sync_buffers",
                "init_sync",
            )
            for value in (True, False)
        ),
        {"broadcast_buffers": np.bool_(True)},
        {"skip_all_reduce_unused_params": np.bool_(True), "find_unused_parameters": np.bool_(True)},
        {"bucket_cap_mb": np.int8(25)},
        {"bucket_cap_mb_list": np.array([1.0, 2.0])},
    ],
    ids=str,
)
def test_booleans_and_numbers_of_numpy_are_taken(arguments: dict[str, Any]) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithBuffer(), process_group=group, **arguments)
        ddp.check_replicas(np.int64(1))  # type: ignore[arg-type]
        ddp.watch_stragglers(np.int64(1))  # type: ignore[arg-type]
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.logging_data()

    only_rank(body)


@pytest.mark.parametrize(
    ("device_ids", "output_device", "is_it"),
    [
        ([1], None, True),
        (np.array([1]), np.int64(1), True),
        ([torch.device("cuda", 1)], "cuda:1", True),
        # As for torch, a type without an index is no error. The module has only one device, so the type means this device.
        ([torch.device("cuda")], None, True),
        (["cuda"], "cuda", True),
        ([0], None, False),
        (["cpu"], None, False),
        (["cuda"], 0, False),
    ],
)
def test_the_ways_to_name_the_modules_device(device_ids: Any, output_device: Any, is_it: bool) -> None:
    parameters: Any = [SimpleNamespace(device=torch.device("cuda", 1))]  # no GPU is needed
    if is_it:
        assert placement(device_ids, output_device, parameters) == torch.device("cuda", 1)
    else:
        with pytest.raises(InvalidArgumentError, match="name the module's device, cuda:1"):
            placement(device_ids, output_device, parameters)


def test_check_reduction_is_explained() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.warns(FutureWarning, match="every reduction is always checked"):
            DistributedDataParallel(WithBuffer(), process_group=group, check_reduction=True)

    only_rank(body)


@pytest.mark.parametrize(
    ("arguments", "at_first", "at_forward"),
    [
        ({}, True, True),
        ({"broadcast_buffers": True}, True, True),
        ({"broadcast_buffers": False}, False, False),
        ({"forward_sync_buffers": True}, True, True),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
        ({"broadcast_buffers": True, "forward_sync_buffers": False}, True, False),
        ({"init_sync": False}, False, True),
    ],
)
def test_when_buffers_are_broadcast(arguments: dict[str, Any], at_first: bool, at_forward: bool) -> None:
    def body(group: ProcessGroup) -> None:
        model = WithBuffer(float(group.rank))
        ddp = DistributedDataParallel(model, process_group=group, **arguments)
        assert model.buffer.tolist() == [0.0 if at_first else group.rank] * 2
        assert model.layer.weight.tolist() == [[group.rank if "init_sync" in arguments else 0.0] * 2]
        model.buffer.fill_(group.rank + 5.0)
        ddp(torch.ones(1, 2))
        assert model.buffer.tolist() == [5.0 if at_forward else group.rank + 5.0] * 2

    run_ranks(2, body)


def test_broadcast_buffers_by_name_is_deprecated_as_in_torch() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.warns(FutureWarning, match="broadcast_buffers is deprecated.*forward_sync_buffers"):
            DistributedDataParallel(WithBuffer(), process_group=group, broadcast_buffers=True)

    only_rank(body)


def test_without_init_sync_modules_are_not_compared() -> None:
    def body(group: ProcessGroup) -> None:
        model = WithBuffer()
        model.register_buffer("extra", torch.zeros(group.rank + 1))
        DistributedDataParallel(model, process_group=group, init_sync=False)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "sizes_mb"),
    [({}, [1, 2]), ({"bucket_cap_mb": 25}, [3]), ({"bucket_cap_mb": 2}, [1, 2]), ({"bucket_cap_mb": 1}, [1, 1, 1])],
)
def test_only_by_default_the_first_bucket_is_small(arguments: dict[str, Any], sizes_mb: list[int]) -> None:
    def body(group: ProcessGroup) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(3)))  # 1 MiB each
        ddp = DistributedDataParallel(model, process_group=group, **arguments)
        assert ddp._reducer.first_bucket_sizes == [size * 2**20 for size in sizes_mb]
        assert ddp.bucket_bytes_cap == arguments.get("bucket_cap_mb", 25) * 2**20

    only_rank(body)


def test_bucket_sizes_are_those_of_the_list() -> None:
    def body(group: ProcessGroup) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(6)))  # 256 bytes each
        kib = 1 / 1024
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb_list=[0.25 * kib, 0.5 * kib, 0.75 * kib])
        assert ddp._reducer.first_bucket_sizes == [256, 512, 768]
        assert ddp.logging_data()["bucket_cap_bytes"] == ddp.bucket_bytes_cap == 768
        assert ddp.bucket_bytes_cap_list == [256, 512, 768]

    only_rank(body)


def test_ignored_parameters_and_buffers_stay_each_ranks_own() -> None:
    def body(group: ProcessGroup) -> None:
        shared, own = WithBuffer(group.rank), WithBuffer(group.rank)
        model = torch.nn.ModuleDict({"shared": shared, "own": own})
        model.register_buffer("odd", torch.zeros(group.rank + 1))  # differs by rank, and is not compared
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ["own.layer.weight", "own.layer.bias", "own.buffer", "odd"]
        )
        ddp = DistributedDataParallel(model, process_group=group)
        assert ddp.parameters_to_ignore == {"own.layer.weight", "own.layer.bias", "own.buffer", "odd"}
        assert (shared.buffer.tolist(), own.buffer.tolist()) == ([0.0] * 2, [group.rank] * 2)
        (shared(torch.ones(1, 2)) + own(torch.ones(1, 2))).sum().mul(group.rank + 1).backward()
        assert shared.layer.bias.grad is not None
        assert own.layer.bias.grad is not None
        assert (shared.layer.bias.grad.item(), own.layer.bias.grad.item()) == (1.5, group.rank + 1)
        names = [name for name, _ in DistributedDataParallel._get_data_parallel_params(model, named_params=True)]
        assert names == ["shared.layer.weight", "shared.layer.bias"]

    run_ranks(2, body)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_parameters_are_found(kind: Any) -> None:
    def body(group: ProcessGroup) -> None:
        model = kind(4, 2, sparse=True)
        ddp = DistributedDataParallel(model, process_group=group)
        ddp(torch.tensor([[group.rank, 3]])).sum().backward()
        assert model.weight.grad.layout is torch.sparse_coo
        divisor = 1.0 if kind is torch.nn.Embedding else 0.5  # a bag takes the mean
        expected = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]) * divisor
        assert torch.equal(model.weight.grad.to_dense(), expected)

    run_ranks(2, body)


def test_a_later_hook_replaces_the_earlier() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithBuffer(), process_group=group)

        def scaled(factor: float, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() * factor)
            return future

        for factor in (2.0, 3.0):
            ddp.zero_grad()
            ddp.register_comm_hook(factor, scaled)
            ddp(torch.ones(1, 2)).sum().backward()
            assert ddp.module.layer.bias.grad.item() == factor  # type: ignore[union-attr]
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        assert ddp.module.layer.bias.grad.item() == 1.0  # type: ignore[union-attr]

    only_rank(body)


def test_the_names_other_libraries_call() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithBuffer(), process_group=group)
        ddp._set_static_graph()
        ddp.require_backward_grad_sync = False
        ddp(torch.ones(1, 2) * (group.rank + 1)).sum().backward()
        assert ddp.module.layer.weight.grad.tolist() == [[group.rank + 1.0] * 2]  # type: ignore[union-attr]
        ddp.require_backward_grad_sync = True
        ddp._check_reducer_finalized()
        ddp._set_ddp_sink_clone(False)
        ddp._set_ddp_runtime_logging_sample_rate(5)
        assert ddp._distributed_rank == group.rank
        ddp(torch.ones(1, 2) * (group.rank + 1)).sum().backward()
        assert ddp.module.layer.weight.grad.tolist() == [[3.0] * 2]  # type: ignore[union-attr]
        data = ddp._get_ddp_logging_data()
        assert data == ddp.logging_data()
        assert (data["world_size"], data["rank"], data["static_graph"]) == (2, group.rank, 1)
        assert data["bucket_sizes"] == "12"
        assert int(data["backward_comm_time"]) > 0
        assert int(data["forward_compute_time"]) > 0
        ddp._remove_autograd_hooks()
        ddp.zero_grad()
        ddp.module(torch.ones(1, 2) * (group.rank + 1)).sum().backward()
        assert ddp.module.layer.weight.grad.tolist() == [[group.rank + 1.0] * 2]  # type: ignore[union-attr]

    run_ranks(2, body)


@pytest.mark.parametrize("how", ["reduced", "accumulated", "under way"])
def test_static_graph_is_too_late_after_a_backward(how: str) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithBuffer(), process_group=group)
        if how == "under way":
            ddp.module.layer.weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)  # type: ignore[union-attr]
            with pytest.raises(ZeroDivisionError):
                ddp(torch.ones(1, 2)).sum().backward()
        else:
            with nullcontext() if how == "reduced" else ddp.no_sync():
                ddp(torch.ones(1, 2)).sum().backward()
        with pytest.raises(MisuseError, match="before the first backward"):
            ddp._set_static_graph()

    only_rank(body)


@pytest.mark.parametrize("how", ["left out", "named", "updated"])
def test_a_copy_on_the_default_group_is_another_replica(how: str) -> None:
    default = init_process_group("in_process", world_size=1)
    try:
        ddp = DistributedDataParallel(
            WithBuffer(3.0), find_unused_parameters=True, bucket_cap_mb=2, process_group=default if how == "named" else None
        )
        if how == "updated":
            ddp.update_process_group(default)
        for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
            assert twin.find_unused_parameters is True
            twin(torch.ones(1, 2)).sum().backward()
            assert twin.module.layer.bias.grad.item() == 1.0
            assert twin.logging_data()["num_buckets_reduced"] == 1
            assert list(twin.state_dict()) == ["module." + name for name in WithBuffer().state_dict()]
            assert ddp.module.layer.bias.grad is None  # type: ignore[union-attr]
    finally:
        destroy_process_group()


def test_a_copy_on_another_group_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithBuffer(), process_group=group)
        with pytest.raises(MisuseError, match=r"cannot be copied or pickled.*ddp\.module"):
            copy.deepcopy(ddp)

    only_rank(body)


def test_torchs_groups_are_taken() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for arguments in ({}, {"process_group": dist.group.WORLD}, {"device_mesh": mesh}):
            if "device_mesh" not in arguments:
                copy.deepcopy(DistributedDataParallel(WithBuffer(), **arguments))  # type: ignore[arg-type]
            ddp = DistributedDataParallel(WithBuffer(), **arguments)  # type: ignore[arg-type]
            assert ddp.process_group is dist.group.WORLD, "what the script knows"
            dist.all_reduce(torch.ones(1), group=ddp.process_group)
            assert isinstance(ddp._group, TorchGroup)
            ddp(torch.ones(1, 2)).sum().backward()
            assert ddp.module.layer.bias.grad.item() == 1.0  # type: ignore[union-attr]
        ours = init_process_group("in_process", world_size=1)
        assert DistributedDataParallel(WithBuffer()).process_group is ours
        with pytest.raises(MisuseError, match="only the default group is found again"):  # it would be on another group
            copy.deepcopy(DistributedDataParallel(WithBuffer(), process_group=dist.group.WORLD))
    finally:
        destroy_process_group()
        dist.destroy_process_group()
