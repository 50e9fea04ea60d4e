from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from syncline.collectives import InvalidArgumentError, P2POp, ProcessGroup, batch_isend_irecv, irecv, isend, recv
from syncline.collectives.engine.composed import PerDeviceGroup
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks

WRONG = {
    "peer": (lambda group: P2POp(isend, torch.zeros(2), 7, group), "rank 7 is not in group"),
    "group peer": (lambda group: P2POp(irecv, torch.zeros(2), None, group, 0, 7), r"expected another rank in 0\.\.1, found 7"),
    "no receiver": (lambda group: P2POp(isend, torch.zeros(2), None, group), "expected a rank, found none"),
    "tag": (lambda group: P2POp(isend, torch.zeros(2), 1 - group.rank, group, -1), "expected a tag of 0 or above, found -1"),
    "tensor": (lambda group: P2POp(isend, None, 1 - group.rank, group), "expected a torch.Tensor, found NoneType"),  # type: ignore[arg-type]
    "output": (
        lambda group: P2POp(irecv, torch.zeros(1).expand(2), 1 - group.rank, group),
        "the tensor would be written, but several of its elements share one place",
    ),
}


@pytest.mark.parametrize("per_device", [False, True], ids=["one group", "group per device"])
@pytest.mark.parametrize(("wrong", "found"), WRONG.values(), ids=WRONG)
def test_a_refused_batch_begins_no_transfer(wrong: Callable[[ProcessGroup], P2POp], found: str, per_device: bool) -> None:
    def body(group: ProcessGroup) -> None:
        used, peer = PerDeviceGroup({"cpu": group}) if per_device else group, 1 - group.rank
        refused, received = torch.zeros(2), torch.zeros(2)
        with pytest.raises(InvalidArgumentError, match=found):
            batch_isend_irecv([P2POp(irecv, refused, peer, used), wrong(used)])
        # If the refused batch had begun its receive, that receive would take this message.
        mine = torch.full((2,), 5.0 + group.rank)
        for work in batch_isend_irecv([P2POp(irecv, received, peer, used), P2POp(isend, mine, peer, used)]):
            work.wait(5)
        assert (refused.tolist(), received.tolist()) == ([0.0, 0.0], [5.0 + peer] * 2)

    run_ranks(2, body)


def test_a_batch_receives_from_any_rank() -> None:
    def body(group: ProcessGroup) -> None:
        received, peer = torch.zeros(2), 1 - group.rank
        mine = torch.full((2,), 1.0 + group.rank)
        works = batch_isend_irecv([P2POp(irecv, received, group=group), P2POp(isend, mine, peer, group)])
        for work in works:
            work.wait(5)
        assert (received.tolist(), works[0].source_rank()) == ([1.0 + peer] * 2, peer)

    run_ranks(2, body)


def test_a_fake_tensor_is_received_from_the_named_sender_without_communication() -> None:
    def body(group: ProcessGroup) -> int:
        with FakeTensorMode():
            fake = torch.empty(2)
            with pytest.raises(InvalidArgumentError, match="expected src or group_src for a FakeTensor"):
                recv(fake, group=group)
            return recv(fake, group=group, group_src=1 - group.rank)

    assert run_ranks(2, body) == [1, 0]
