"""The attributes of torch's DistributedDataParallel that other libraries read, and the logging data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import MisuseError, ProcessGroup, destroy_process_group, init_process_group
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel, Join

pytestmark = pytest.mark.ranks

TIMES = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")


class WithUnused(torch.nn.Module):
    def __init__(self, *, buffer: bool = True) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1, bias=False)
        if buffer:
            self.register_buffer("count", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)  # type: ignore[no-any-return]


def step(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(1, 2)).sum().backward()


def test_what_libraries_read() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithUnused(), process_group=group, bucket_cap_mb=3, find_unused_parameters=True)
        assert ddp.process_group is group
        assert ddp.device_mesh is None
        assert (ddp.device_type, ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_list) == ("cpu", 3 * 2**20, [])
        assert ddp.will_sync_module_buffers() is True
        assert list(ddp.named_module_buffers) == ["count"]
        assert ddp.modules_buffers[0] is ddp.module.count
        step(ddp)
        ddp.reducer._check_reducer_finalized()
        assert ddp.reducer._rebuild_buckets() is False, "unused parameters keep their order"
        without = DistributedDataParallel(WithUnused(buffer=False), process_group=group)
        assert without.will_sync_module_buffers() is False

    run_ranks(2, body)


def test_backwards_that_the_script_would_end_are_refused() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        ddp.require_manual_backward_finalization = False
        with pytest.raises(MisuseError, match="every backward waits"):
            ddp.require_manual_backward_finalization = True
        assert (ddp.require_manual_backward_finalization, ddp.should_finalize_after_backward) == (False, False)
        with pytest.raises(MisuseError, match="leave out finalize_backward"):
            ddp.finalize_backward()

    run_ranks(1, body)


def test_buckets_are_rebuilt_when_asked() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3))), process_group=group)
        step(ddp)
        assert (ddp.reducer._rebuild_buckets(), ddp.reducer._rebuild_buckets()) == (True, False)
        assert ddp.logging_data()["has_rebuilt_buckets"] == 1

    run_ranks(2, body)


def test_whether_buckets_are_rebuilt_is_told_from_the_second_forward_on() -> None:
    """Torch's ZeRO, overlapped with backward, notes the buckets from then on."""

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        found = [ddp._has_rebuilt_buckets]
        for _ in range(2):
            outputs = ddp(torch.ones(1, 2))
            found.append(ddp._has_rebuilt_buckets)
            outputs.sum().backward()
        assert found == [False, False, True]

    run_ranks(2, body)


def test_tensors_are_broadcast_together() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithUnused(), process_group=group)
        tensors = [torch.full((2,), float(group.rank)), torch.full((3,), group.rank + 10.0)]
        ddp._distributed_broadcast_coalesced(tensors, 16, 1)
        assert [tensor.tolist() for tensor in tensors] == [[1.0] * 2, [11.0] * 3]
        ddp.module.count.fill_(group.rank + 5.0)
        ddp._sync_buffers()
        assert ddp.module.count.item() == 5.0

    run_ranks(2, body)


def test_the_join_configuration_is_told() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        assert ddp._join_config.enable is False
        with Join([ddp], throw_on_early_termination=True):
            assert tuple(ddp._join_config) == (True, True, True)
            step(ddp)
        assert ddp._join_config.enable is False

    run_ranks(1, body)


def test_logging_data_have_torchs_names() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithUnused(), process_group=group, find_unused_parameters=True)
        assert ddp.logger._get_ddp_logging_data().ints_map["iteration"] == 0
        for _ in range(4):
            step(ddp)
        data: dict[str, Any] = ddp._get_ddp_logging_data()
        assert (data["iteration"], data["dtypes"], data["module_name"]) == (3, "float", "WithUnused")
        assert (data["unused_parameter_size"], data["total_parameter_size_bytes"]) == (12, 24)
        assert (data["bucket_sizes"], data["has_rebuilt_buckets"]) == ("24", 0)
        assert all(data[f"avg_{name}_time"] > 0 for name in TIMES[:3])
        assert not data.keys() & {"error", "comm_hook"}
        assert data.keys() >= {"master_addr", "gloo_socket_ifname", "gloo_device_transport"}

    run_ranks(2, body)


def test_logging_data_of_rebuilt_buckets_and_of_a_hook() -> None:
    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        ddp.register_comm_hook(None, hook)
        for _ in range(2):
            step(ddp)
        data = ddp.logging_data()
        assert str(data["comm_hook"]).endswith("hook")
        assert (data["rebuilt_bucket_sizes"], data["bucket_sizes"]) == ("12", "12")
        order = str(data["prev_iteration_grad_ready_order_indices"])
        assert sorted(order.split(", ")) == ["0", "1"]
        assert data["rebuilt_per_bucket_param_indices"] == order.replace(",", "")

    run_ranks(1, body)


@pytest.mark.parametrize("kind", [dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS])
def test_a_built_in_hook_is_logged_by_torchs_name_until_another_replaces_it(kind: dist.BuiltinCommHookType) -> None:
    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]: ...

    init_process_group("in_process", world_size=1)
    try:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
        ddp._register_builtin_comm_hook(kind)
        assert ddp.logging_data()["comm_hook"] == str(kind)
        assert "comm_hook" not in copy.deepcopy(ddp).logging_data(), "a copy has no hook"
        ddp.register_comm_hook(None, hook)
        assert str(ddp.logging_data()["comm_hook"]).endswith("hook")
    finally:
        destroy_process_group()


def test_a_copy_has_no_buffer_hook_and_averages_though_it_was_made_within_no_sync() -> None:
    group = init_process_group("in_process", world_size=1)
    try:
        ddp = DistributedDataParallel(torch.nn.BatchNorm1d(2))
        calls: list[object] = []
        # A group cannot be copied.
        ddp._register_buffer_comm_hook(group, lambda state, buffers: calls.append(state))
        with ddp.no_sync():
            copied = copy.deepcopy(ddp)
            copied(torch.ones(2, 2)).sum().backward()
        assert not calls
        assert not copied.has_local_gradients
    finally:
        destroy_process_group()


def test_logging_data_have_the_latest_error() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        with pytest.raises(TypeError, match="must be callable"):
            ddp.register_comm_hook(None, 3)  # type: ignore[arg-type]
        data = ddp.logging_data()
        assert data["has_error"] == 1
        assert "Communication hook must be callable" in str(data["error"])

    run_ranks(1, body)


def test_a_second_static_graph_is_no_error() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group, static_graph=True)
        with pytest.warns(UserWarning, match="static already"):
            ddp._set_static_graph()

    run_ranks(1, body)
