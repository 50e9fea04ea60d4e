"""The communication of a DistributedDataParallel while some ranks have no inputs left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.collectives import MisuseError, ProcessGroup, ReduceOp
from syncline.collectives.internal import message_device
from syncline.reducer import Reducer

from .buffers import Buffers
from .join import JoinHook
from .module_state import ModuleState
from .sync_batch_norm import SyncBatchNorm


@dataclass(frozen=True)
class Replica:
    """The parts of one `DistributedDataParallel` that `UnevenInputs` needs."""

    module: torch.nn.Module
    state: ModuleState
    buffers: Buffers
    reducer: Reducer
    process_group: ProcessGroup
    device: torch.device


class UnevenInputs(JoinHook):
    """Makes ranks without inputs take part in the collectives of the ranks with inputs.

    ::

        with inputs       announce ──► buffers ──► rebuild buckets, once ──► backward: buckets, map of used parameters
        without           announce ──► buffers ──► Reducer.shadow_backward: the same collectives, with zeros

    Buffers come from the highest rank that has inputs. If there is a communication hook, all ranks call the hook.

    Args:
        divide_by_initial_world_size: True: divide gradients by the number of all ranks. False: divide by the number of ranks
            with inputs.
        throws: whether the join context raises an error on all ranks as soon as one rank has no inputs.

    Raises:
        MisuseError: `throws` is False, and the module has a buffer hook or a SyncBatchNorm. Or there is a communication hook,
            and `divide_by_initial_world_size` is False.
    """

    def __init__(self, replica: Replica, *, divide_by_initial_world_size: bool, throws: bool) -> None:
        if replica.buffers.hook is not None and not throws:
            raise MisuseError(
                "join() cannot say what a buffer hook shall do on a rank that has no inputs: do without the hook, or "
                "synchronise buffers in the loop"
            )
        if replica.reducer.hook[0] is not None and not divide_by_initial_world_size:
            raise MisuseError(
                "divide_by_initial_world_size=False means nothing to a communication hook, which divides as it likes "
                "(mixed_precision uses one, too): leave it out, or do without the hook or mixed_precision"
            )
        layers = (SyncBatchNorm, torch.nn.SyncBatchNorm)
        if any(isinstance(part, layers) for part in replica.module.modules()) and not throws:
            raise MisuseError(
                "join() cannot run the forward of SyncBatchNorm on a rank that has no inputs: use the module without "
                "converting it, give that rank empty batches instead of join(), or pass throw_on_early_termination=True"
            )
        self._replica = replica
        self._divides_by_all = divide_by_initial_world_size

    def before_forward(self, present: Sequence[int], *, will_reduce: bool) -> int:
        """Announce the collectives of this forward. Each rank with inputs calls this method.

        `present` are the ranks with inputs. `will_reduce` says whether the backward of this forward averages gradients.

        Returns:
            The rank whose buffers all ranks get.
        """
        self._announce(will_reduce=will_reduce, sends_buffers=self._replica.buffers.are_due)
        if will_reduce:
            self._adjust(present)
        return present[-1]

    def main_hook(self, present: Sequence[int]) -> None:
        """Take part in one forward and backward of the other ranks. Each rank without inputs calls this method."""
        will_reduce, sends_buffers = self._announce(will_reduce=False, sends_buffers=False)
        if sends_buffers:
            self._replica.buffers.broadcast(self._replica.process_group, present[-1])
        if will_reduce:
            self._adjust(present)
            self._replica.reducer.shadow_backward()

    def post_hook(self, last_rank: int) -> None:
        """Give all ranks the parameters of `last_rank`, and also its buffers if forwards synchronise buffers."""
        buffers = self._replica.buffers
        self._replica.state.broadcast(self._replica.process_group, last_rank, buffers=buffers.enabled)
        # The next forward must synchronise buffers on all ranks or on none. Ranks without inputs have run fewer forwards, so
        # their flags may differ.
        buffers.are_stale = True

    def leave(self) -> None:
        """From now on, divide gradients by the number of all ranks again."""
        self._replica.reducer.divide_by(None)

    def _announce(self, *, will_reduce: bool, sends_buffers: bool) -> tuple[bool, bool]:
        """Exchange which collectives the ranks with inputs will call. A collective of all ranks, with or without inputs."""
        group = self._replica.process_group
        device = message_device(group, self._replica.device)
        plans = torch.tensor([will_reduce, sends_buffers], dtype=torch.uint8, device=device)
        # Ranks without inputs pass zeros, so the maximum is what the other ranks announce.
        with group.marked("a forward in join()"):
            group.all_reduce(plans, ReduceOp.MAX)
        first, second = plans.tolist()
        return bool(first), bool(second)

    def _adjust(self, present: Sequence[int]) -> None:
        group, reducer = self._replica.process_group, self._replica.reducer
        if len(present) < group.size and reducer.needs_everyone:
            raise MisuseError(
                f"static_graph=True on {group.place()}: in the first backward all ranks learn the graph, but only "
                f"{len(present)} of {group.size} have inputs. Give every rank at least one, or use find_unused_parameters=True"
            )
        reducer.divide_by(None if self._divides_by_all else len(present))
