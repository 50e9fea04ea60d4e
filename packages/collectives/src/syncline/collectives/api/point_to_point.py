"""Sends and receives as functions on the default group, with torch.distributed's names, arguments and defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import InvalidArgumentError
from ..group import ProcessGroup
from ..tensors.checks import has_fakes, is_list, resolved
from ..work import Work
from .default_group import rank_in, resolve_group


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Begin to send a tensor to another rank, and return a `Work` at once.

    Do not write the tensor before the work has finished. Pass the receiver as `dst` (a rank of the default group) or as
    `group_dst` (a rank of the group). See [`ProcessGroup.send`][syncline.collectives.ProcessGroup.send].
    """
    chosen = resolve_group(group)
    return chosen.send(tensor, rank_in(chosen, dst, group_dst), tag, async_op=True)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Begin to receive a tensor, and return a `Work` at once.

    Do not use the tensor before the work has finished. Pass the sender as `src` (a rank of the default group) or as `group_src`
    (a rank of the group). By default, the tensor may come from any rank (not over NCCL); then the work's `source_rank()` is
    the sender's rank in the group. See [`ProcessGroup.recv`][syncline.collectives.ProcessGroup.recv].
    """
    chosen = resolve_group(group)
    return chosen.recv(tensor, _source_in(chosen, src, group_src), tag, async_op=True)


def _source_in(group: ProcessGroup, src: int | None, group_src: int | None) -> int | None:
    # If both are None, the tensor may come from any rank.
    return None if src is None and group_src is None else rank_in(group, src, group_src)


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send a tensor to another rank, which calls `recv` or `irecv`.

    Pass the receiver as `dst` (a rank of the default group) or as `group_dst` (a rank of the group). See
    [`ProcessGroup.send`][syncline.collectives.ProcessGroup.send].
    """
    isend(tensor, dst, group, tag, group_dst).wait(resolve_group(group).timeout_s)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a tensor, and return the sender's rank in the default group.

    Pass the sender as `src` (a rank of the default group) or as `group_src` (a rank of the group). By default, the tensor may
    come from any rank (not over NCCL). See [`ProcessGroup.recv`][syncline.collectives.ProcessGroup.recv].
    """
    chosen = resolve_group(group)
    work = irecv(tensor, src, group, tag, group_src)
    work.wait(chosen.timeout_s)
    source = work.source_rank()
    # A FakeTensor was not received; see Note [Tensors that are no memory] in `tensors.checks`.
    if source is None:
        source = _source_in(chosen, src, group_src)
    if source is None:
        raise InvalidArgumentError(
            f"recv on {chosen.place()}: expected src or group_src for a FakeTensor, found neither: no rank sends it, so its "
            "sender is not known"
        )
    return chosen.ranks[source]


@dataclass
class P2POp:
    """One send or receive in the list for `batch_isend_irecv`.

    `op` is the function `isend` or `irecv` of Syncline, and the other fields are the arguments of this function. `peer` stands
    for `dst` or `src`, and `group_peer` stands for `group_dst` or `group_src`.
    """

    op: Callable[..., Work]
    tensor: torch.Tensor
    peer: int | None = None
    group: ProcessGroup | None = None
    tag: int = 0
    group_peer: int | None = None

    def __post_init__(self) -> None:
        if self.op not in (isend, irecv):
            raise InvalidArgumentError(f"expected isend or irecv of syncline.collectives as op, found {self.op!r}")


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin several sends and receives of one group. Returns one `Work` for each entry, in the order of the list.

    If an entry is wrong, no transfer begins. There is one exception: if a tag is too large for the communication library, the
    transfers of all earlier entries have begun.

    Raises:
        InvalidArgumentError: the list is empty, its entries are for different groups, or `isend` or `irecv` would refuse an
            entry.
    """
    if not is_list(p2p_op_list, P2POp):
        raise InvalidArgumentError(f"expected a list of P2POps of syncline.collectives, found {p2p_op_list!r:.200}")
    if not p2p_op_list:
        raise InvalidArgumentError("expected at least one P2POp, found none")
    if len({id(resolve_group(entry.group)) for entry in p2p_op_list}) > 1:
        raise InvalidArgumentError("expected all P2POps to be of one group, found several; make one batch for each group")
    # Check all entries before the first transfer begins, because nobody can take a transfer back. A receive that has begun
    # would take the message of a later call.
    for entry in p2p_op_list:
        _check(entry)
    return [entry.op(entry.tensor, entry.peer, entry.group, entry.tag, entry.group_peer) for entry in p2p_op_list]


def _check(entry: P2POp) -> None:
    group = resolve_group(entry.group)
    peer = (rank_in if entry.op is isend else _source_in)(group, entry.peer, entry.group_peer)
    tensor = resolved(entry.tensor)
    # A FakeTensor is not sent; see Note [Tensors that are no memory] in `tensors.checks`.
    if not has_fakes([tensor]):
        group.check_transfer("send" if entry.op is isend else "recv", tensor, peer, entry.tag)
