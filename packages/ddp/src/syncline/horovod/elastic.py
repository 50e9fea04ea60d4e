"""Continue training when ranks die or join: `@hvd.elastic.run`, and classes for the state of the training.

::

    run(train)(state)    sync ──► train(state): ... commit ... commit ...
    a rank is lost       shrink ──► restore the last commit ──► reset callbacks ──► sync ──► train(state)
    a process waits      commit raises HostsUpdatedInterrupt on all ──► admit ──► reset callbacks ──► sync ──► train(state)

`sync`, `restore` and `commit` are methods of `State`. `shrink` and `admit` are methods of `ProcessGroup`. To add a rank, start
the same script in a new process with SYNCLINE_JOIN=1.

As in Horovod, steps after the last commit are lost. `syncline.ddp.Elastic` loses no step.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import logging
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from syncline.collectives import ProcessGroup, StoreError, TransportError
from syncline.collectives.internal import replace_default_group
from syncline.ddp.training_state import NO_RECOVERY, load_optimizer_state, rank_with_state

from .state import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .world import rank, replace_world, size, world

logger = logging.getLogger("syncline.horovod")

T = TypeVar("T")

_GIVE_UP_S = 300.0


class HostsUpdatedInterrupt(Exception):
    """Raised by `commit` if new processes wait to join the training. `run` then lets these processes in."""


def run(func: Callable[..., T]) -> Callable[..., T]:
    """A decorator for a training function `func(state, ...)`. When a rank is lost or joins, all ranks call `func` again.

    Before each call of `func`, all ranks get the state of the lowest rank that has the state of the training.

    Raises:
        RankLostError: only new processes are left, which do not have the state of the training yet.
        TransportError: a rank is lost, and the group cannot go on without this rank (`ProcessGroup.missing_for_shrink`). Or the
            remaining ranks do not form a new group in time. Or the other ranks do not let this new process in.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        # If this process joins a training that already runs, wait until the group lets the process in.
        is_new = world().group.is_waiting  # until its first `sync`, this process does not have the state of the training
        if is_new:
            _change_ranks(lambda: world().group.admit(silence_timeout_s=_GIVE_UP_S))
            state.on_reset()
        lack = world().group.missing_for_shrink()
        if lack is not None and world().group.size > 1:
            logger.warning("training ends if a rank is lost: %s", lack)
        while True:
            group = world().group
            group.expect_losses(lack is None)
            try:
                try:
                    # A new process may be rank 0, if the ranks before it were lost during its first `sync`.
                    state.root_rank = rank_with_state(allgather_object(None if is_new else 0))
                    state.sync()
                    is_new = False
                    return func(state, *args, **kwargs)
                except TransportError as error:
                    # The group cannot go on without the lost rank, or the recovery cannot help this rank.
                    if lack is not None or isinstance(error, NO_RECOVERY):
                        raise
                    logger.info("rank lost or out of reach: %s", error)
                    is_lost = True
                    # The failed group keeps the error, and the error keeps the variables of `func`, such as an optimizer. Each
                    # rank must have the same optimizers in the new group.
                    traceback.clear_frames(error.__traceback__)
                except HostsUpdatedInterrupt:
                    is_lost = False
                # Not in the except blocks: there the exception still holds the variables of `func`, such as an optimizer.
                _change_ranks(group.shrink if is_lost else group.admit)
            finally:
                group.expect_losses(False)
            if is_lost:
                state.restore()
            logger.info("went on with %d rank(s)", size())
            state.on_reset()

    return wrapper


def _change_ranks(make: Callable[[], ProcessGroup]) -> None:
    """Go on with the group that `make` returns. If a rank is lost meanwhile, go on without this rank."""
    failed_s: float | None = None  # the time of the first error, not of the call: a new process may wait long for `admit`
    while True:
        try:
            _go_on(make())
        except TransportError as error:
            now_s = time.perf_counter()
            failed_s = now_s if failed_s is None else failed_s
            # If a new process was not let in, it has no group to recover.
            is_outside = world().group.is_waiting
            if is_outside or isinstance(error, NO_RECOVERY) or now_s - failed_s > _GIVE_UP_S:
                raise
        else:
            return
        make = world().group.shrink


def _go_on(group: ProcessGroup) -> None:
    # The calls below communicate. If a rank is lost meanwhile, `_change_ranks` must shrink the new group, not the old one.
    old, world().group = world().group, group
    replace_default_group(old, group)
    # Each rank must have the same optimizers now, so collect those that the last call of `func` has left behind. For example, a
    # learning rate scheduler makes a cycle of references that includes its optimizer.
    gc.collect()
    replace_world(group)


class State:
    """The state of a training. Derived classes define how to save, restore and synchronise the state.

    Attributes:
        root_rank: the rank whose state `sync` gives to all ranks. `run` sets `root_rank` to the lowest rank that has the state
            of the training.
    """

    root_rank = 0

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions that `on_reset` calls, for example to adapt the learning rate to the new number of ranks."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, then the callbacks. `run` calls this method after a change of ranks, before `sync`."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Call `save`, then `check_host_updates`. Every rank calls this method at the same point of the training.

        Raises:
            HostsUpdatedInterrupt: on all ranks, if a new process waits. `run` then lets this process in.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if new processes wait to join. This is a collective.

        If the store of the job fails while rank 0 looks for new processes, rank 0 logs a warning, and the training goes on.
        """
        group = world().group
        # Whether the group can admit processes depends only on how it was made. So either all ranks return here, or all take
        # part in the broadcast below.
        if group.missing_for_admit() is not None:
            return
        # Only rank 0 counts the waiting processes, and broadcasts the number. So all ranks raise at the same commit.
        waiting = 0
        if group.rank == 0:
            try:
                waiting = group.newcomers()
            except StoreError as error:  # the next commit finds the processes
                logger.warning("the store did not say whether somebody waits to be let in: %s", error)
        if broadcast_object(waiting):
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last saved state. `run` calls this method after a rank is lost."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of `root_rank`. `run` calls this method before it calls the training function."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do nothing. A derived class may override this method, which `on_reset` calls before the callbacks."""


class ObjectState(State):
    """A state of Python objects. Each object is an attribute of the state.

    Args:
        kwargs: the objects, each with the name of its attribute. The objects must support pickle.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._saved = dict(kwargs)
        self._put_back()

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """Go back to the last saved state."""
        self._put_back()

    def sync(self) -> None:
        """Give all ranks the state of `root_rank`."""
        self._saved = broadcast_object({name: getattr(self, name) for name in self._saved}, self.root_rank)
        self._put_back()

    def _put_back(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))


class TorchState(ObjectState):
    """A state of models, optimizers, samplers and other objects. Each object is an attribute of the state.

    Args:
        model: a module, or None.
        optimizer: an optimizer of torch, a `DistributedOptimizer`, or None.
        kwargs: further objects, each with the name of its attribute. Objects without `state_dict` and `load_state_dict` must
            support pickle.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        things = {"model": model, "optimizer": optimizer, **kwargs}
        # Keep only the names: if the script replaces an object, this state must not keep the old object alive.
        self._kept = [name for name, thing in things.items() if _has_state(thing)]
        self._snapshots: dict[str, Any] = {}
        for name in self._kept:
            setattr(self, name, things[name])
        super().__init__(**{name: thing for name, thing in things.items() if name not in self._kept})
        self._save_kept()

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        self._save_kept()
        super().save()

    def restore(self) -> None:
        """Go back to the last saved state."""
        for name in self._kept:
            # Load a copy of the snapshot, because an optimizer may keep the loaded tensors and change them later.
            thing, snapshot = getattr(self, name), copy.deepcopy(self._snapshots[name])
            if isinstance(thing, torch.optim.Optimizer):
                load_optimizer_state(thing, snapshot)
            else:
                thing.load_state_dict(snapshot)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the state of `root_rank`."""
        for name in self._kept:
            thing = getattr(self, name)
            if isinstance(thing, torch.nn.Module):
                _sync_module(thing, self.root_rank)
            elif isinstance(thing, torch.optim.Optimizer):
                broadcast_optimizer_state(thing, self.root_rank)
            else:
                thing.load_state_dict(broadcast_object(thing.state_dict(), self.root_rank))
        super().sync()
        # Save, so that `restore` goes back to the state that all ranks have now.
        self._save_kept()

    def _save_kept(self) -> None:
        self._snapshots = {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._kept}


def _sync_module(module: torch.nn.Module, root_rank: int) -> None:
    state = module.state_dict()
    others = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    broadcast_parameters({name: value for name, value in state.items() if name not in others}, root_rank)
    # Objects from `get_extra_state`. All ranks make this call, because the root decides which objects there are.
    others = broadcast_object(others, root_rank)
    if others and rank() != root_rank:
        state.update(others)
        module.load_state_dict(state)


def _has_state(thing: object) -> bool:
    return isinstance(thing, (torch.nn.Module, torch.optim.Optimizer)) or (
        hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
    )


class ElasticSampler(Sampler[int]):
    """Gives each rank a share of the samples that are not used yet in the present epoch.

    After a change of ranks, the unused samples are divided again. Put the sampler into the `TorchState`. Call `record_batch`
    after each batch, and `set_epoch` at the end of each epoch. All shares have the same size, so some samples may be used more
    than once.

    Args:
        dataset: the data set, whose size must not change.
        shuffle: use a new order in each epoch, the same on all ranks.
        seed: the seed of the random orders.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. All samples are unused again."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's
        """Record that each rank has used `batch_size` more samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of samples that are used in this epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a saved state, and divide the unused samples among the present ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the unused samples among the present ranks."""
        self.rank, self.num_replicas = rank(), size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank's samples.

        With n ranks, rank r gets the samples number r, r + n, r + 2 n, ... of the remaining samples.
        """
        total = self.num_samples * self.num_replicas
        # Near the end of an epoch there may be fewer samples than ranks. Then `cycle` repeats samples as often as needed.
        padded = itertools.islice(itertools.cycle(self.remaining_indices), total)
        return itertools.islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples


__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
