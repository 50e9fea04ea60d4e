"""Checks of send and recv: a ring, tags, any source, and futures. Most checks do nothing in a group of one rank."""

from __future__ import annotations

from functools import partial

import torch

from ...errors import InvalidArgumentError
from ...group import ProcessGroup
from .values import LARGE_NUMEL, LAYOUTS, MOVABLE_DTYPES, Check, Laid, bits, expect, expect_equal, expect_raises, values


def ring(group: ProcessGroup) -> None:
    """Check send and recv with every dtype and layout: each rank sends to its right neighbour in a ring."""
    if group.size == 1:
        return
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    for dtype in MOVABLE_DTYPES:
        tensor = torch.zeros(11, dtype=dtype)
        receiving = group.recv(tensor, left, async_op=True)
        sending = group.send(bits((11,), group.rank, dtype), right, async_op=True)
        receiving.wait()
        sending.wait()
        expect(tensor, bits((11,), left, dtype), f"{dtype} from rank {left}")
        expect_equal(receiving.source_rank(), left, "source rank")
        expect_equal(sending.source_rank(), None, "source rank of a send")
    for layout in LAYOUTS:
        laid = Laid(layout, values(layout.shape, group.size))
        receiving = group.recv(laid.tensor, left, async_op=True)
        group.send(Laid(layout, values(layout.shape, group.rank)).tensor, right)
        receiving.wait()
        laid.expect(values(layout.shape, left))


def both_send_first(group: ProcessGroup) -> None:
    """Check that ranks do not block one another if every rank starts a large send before its receive."""
    if group.size == 1:
        return
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    sending = group.send(values((LARGE_NUMEL,), group.rank), right, async_op=True)
    tensor = torch.zeros(LARGE_NUMEL)
    group.recv(tensor, left)
    sending.wait()
    expect(tensor, values((LARGE_NUMEL,), left), f"{LARGE_NUMEL} elements from rank {left}")


def tags(group: ProcessGroup) -> None:
    """Check that a receive gets the oldest message with its tag, even if messages with other tags were sent earlier.

    Some receives name a sender, the others take messages from any rank. A sender passes one of the tags as an integer of 8
    bits. A comparison of this integer with a large number would overflow.
    """
    if group.size == 1:
        return
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    narrow: int = torch.tensor(8, dtype=torch.uint8)  # type: ignore[assignment]
    given: list[int] = [0, 7, narrow, 7 + 2**8, 7 + 2**12, 31_999]
    for source in (left, None):
        works = [
            group.send(values((3,), group.rank + 10 * number + int(tag)), right, tag, async_op=True)
            for number in range(3)
            for tag in given
        ]
        group.barrier()  # all messages have been sent, so a receive could take any of them
        for tag in map(int, reversed(given)):
            for number in range(3):
                tensor = torch.zeros(3)
                group.recv(tensor, source, tag)
                expect(tensor, values((3,), left + 10 * number + tag), f"message {number} with tag {tag}")
        for work in works:
            work.wait()


def apart_from_other_calls(group: ProcessGroup) -> None:
    """Check that a receive in flight gets only its own message, and nothing from a collective or from another group."""
    if group.size == 1:
        return
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    received = torch.zeros(13)
    receiving = group.recv(received, left, async_op=True)
    for root in range(group.size):
        tensor = values((13,), group.rank + 1)
        group.broadcast(tensor, root)
        expect(tensor, values((13,), root + 1), "broadcast during a receive")
    part = group.split(0) if group.can_split else None
    if part is not None:
        tensor = torch.zeros(13)
        sending = part.send(values((13,), group.rank + 20), right, async_op=True)
        part.recv(tensor, left)
        sending.wait()
        expect(tensor, values((13,), left + 20), "message in another group")
        part.close()
    expect_equal(receiving.is_completed(), False, "is_completed() of a receive before its message")
    group.barrier()  # no rank sends earlier
    sending = group.send(values((13,), group.rank), right, async_op=True)
    receiving.wait()
    sending.wait()
    expect(received, values((13,), left), "message after other calls")


def tracked(group: ProcessGroup) -> None:
    """Check that a parameter can be sent and received, and that an inference tensor can be received."""
    if group.size == 1:
        return
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    with torch.inference_mode():
        targets = [torch.zeros(2, 3), torch.zeros(3, 2).t()]
    targets += [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(3, 2).t()), torch.zeros(2, 3)]
    for target in targets:
        receiving = group.recv(target, left, async_op=True)
        sending = group.send(torch.nn.Parameter(values((2, 3), group.rank)), right, async_op=True)
        receiving.wait()
        sending.wait()
        expect(target.detach(), values((2, 3), left), "a parameter of the left rank")
        is_parameter = isinstance(target, torch.nn.Parameter)
        expect_equal((target.requires_grad, target.grad_fn), (is_parameter, None), "autograd's view of the tensor")


def any_source(group: ProcessGroup) -> None:
    """Check receives from any source: each message arrives once, and the work names the sender."""
    if group.rank > 0:
        group.send(values((5,), group.rank), 0, tag=3)
        return
    sources = []
    for _ in range(group.size - 1):
        tensor = torch.zeros(5)
        work = group.recv(tensor, None, tag=3)
        source = work.source_rank()
        assert source is not None
        expect(tensor, values((5,), source), f"from rank {source}")
        sources.append(source)
    expect_equal(sorted(sources), list(range(1, group.size)), "sources")


def futures(group: ProcessGroup) -> None:
    """Check that the future of a receive completes, although nobody waits for the work."""
    if group.size == 1:
        return
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    tensor = torch.zeros(4)
    future = group.recv(tensor, left, tag=1, async_op=True).get_future().then(lambda done: done.value()[0].sum().item())
    group.barrier()  # no rank sends before all ranks have started to receive
    sending = group.send(values((4,), group.rank), right, tag=1, async_op=True).get_future()
    expect_equal(future.wait(), values((4,), left).sum().item(), "what the callback saw")
    sending.wait()


def refusals(group: ProcessGroup) -> None:
    """Check that a peer outside the group, the rank itself as peer, and a tag below 0 are refused."""
    tensor = torch.zeros(2)
    for name, call in (
        ("send to oneself", partial(group.send, tensor, group.rank)),
        ("recv from oneself", partial(group.recv, tensor, group.rank)),
        ("send outside", partial(group.send, tensor, group.size)),
        ("recv outside", partial(group.recv, tensor, -1)),
    ):
        expect_raises(InvalidArgumentError, call, name, "another rank")
    expect_raises(InvalidArgumentError, partial(group.recv, tensor, None, -1), "tag", "tag")


CHECKS: dict[str, Check] = {
    "point_to_point_ring": ring,
    "point_to_point_both_send_first": both_send_first,
    "point_to_point_tags": tags,
    "point_to_point_apart_from_other_calls": apart_from_other_calls,
    "point_to_point_tracked": tracked,
    "point_to_point_any_source": any_source,
    "point_to_point_futures": futures,
    "point_to_point_refusals": refusals,
}
