"""Elastic training continues when ranks are lost, and lets new ranks join."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, TypeVar

import torch

from syncline.collectives import (
    BackendUnavailableError,
    InvalidArgumentError,
    MisuseError,
    ProcessGroup,
    RankLostError,
    StoreError,
    TransportError,
    exchange_objects,
)
from syncline.collectives.internal import DEFAULT_SILENCE_TIMEOUT_S, broadcast_object, replace_default_group

from .distributed_data_parallel import DistributedDataParallel
from .elastic_sampler import ElasticSampler
from .logging_data import name_of_hook
from .step_snapshot import StepSnapshot
from .training_state import NO_RECOVERY, HookState, Stateful, TrainingState, can_be_saved, rank_with_state

logger = logging.getLogger("syncline.ddp")

Batch = TypeVar("Batch")


class _Phase(Enum):
    JOINING = auto()  # a newcomer, which has not yet got the state of the training
    BETWEEN_STEPS = auto()  # outside of `with elastic.step():`
    COMPUTING = auto()  # in a step, before the agreement to apply the step
    AGREEING = auto()  # waits for the agreement to apply the step
    APPLYING = auto()  # the ranks have agreed to apply the step
    ENDING_EPOCH = auto()  # waits for the agreement that the epoch has ended
    CLOSED = auto()  # after `close`


class _NotAppliedError(Exception):
    """The step was not applied, and must be repeated. `step` catches this error."""


class Elastic:
    """Lets a training loop continue when ranks die or join. Either all ranks apply a step, or all ranks repeat this step.

        sampler = ElasticSampler(len(data), batch_size=96)
        loader = DataLoader(data, batch_sampler=sampler)
        elastic = Elastic(model, optimizer, sampler)
        for epoch in elastic.epochs(epochs):
            for images, labels in elastic.batches(loader):
                with elastic.step():
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(images), labels) * sampler.weight
                    loss.backward()
                    optimizer.step()

    If a rank is lost, a `TransportError` ends the body of `with elastic.step():` on the remaining ranks. The `with` statement
    catches this error, and the remaining ranks form a new group (a *recovery*). Then `batches` yields the failed batch again,
    divided among these ranks. If your script calls a collective outside of `with elastic.step():`, and a rank is lost, the
    collective raises an error as usual.

    At the first `optimizer.step()` in the body, the ranks agree that all ranks apply the step. After this agreement the body
    must not communicate. If a collective fails after the agreement, `with elastic.step():` raises a `MisuseError`.

    After a recovery, `model.join_process_group` is the new group. If the old group was the default group, the new group becomes
    the default group.

    Register a communication hook before you make `Elastic`. If the hook's state holds a group, register the hook again after a
    recovery. Add layers only outside of `with elastic.step():`: a repeated step does not remove layers that its body has added.

    A *newcomer* is a process that you start later, with the same script and with SYNCLINE_JOIN=1. In a newcomer, the
    constructor of `Elastic` waits until the other ranks let the newcomer in. Then the newcomer has the state of the training,
    and continues at the step of the other ranks. The newcomer must have the same hook, the same parameters (also of added
    layers), a sampler with the same arguments, and the same types of optimizers and of objects in `stateful`.

    The page "Survive failures" describes gradient accumulation, hooks, and newcomers.

    Args:
        model: the wrapped model. The model's group must support
            [`ProcessGroup.shrink`][syncline.collectives.ProcessGroup.shrink].
        optimizer: one or several optimizers of the model's parameters. No optimizer may step within backward
            (`model.fused_optimizer`).
        sampler: the sampler that divides each batch among the ranks.
        stateful: other objects that change with the steps, such as learning rate schedulers or a GradScaler. A repeated step
            starts with their state from before the step. All ranks pass the objects in the same order.
        min_ranks: the training ends with an error if fewer than `min_ranks` ranks are left after a rank is lost.
        max_failures: the largest number of ranks that may be lost in the whole training. None: any number.
        silence_timeout_s: the number of seconds that a recovery waits for a rank that does not answer and may still run; see
            [`ProcessGroup.shrink`][syncline.collectives.ProcessGroup.shrink].
        give_up_s: the largest number of seconds that one recovery may take. A newcomer also waits at most this number of
            seconds to be let in.
        admit_every: the ranks look for newcomers after every `admit_every` applied steps, if the group can let ranks in
            (`ProcessGroup.missing_for_admit`).

    Attributes:
        applied_steps: the number of steps that all ranks have applied.
        lost_ranks: the numbers of the lost ranks, as in `ProcessGroup.members`. These numbers do not change in a recovery.
        recovery_s: the duration of each recovery in seconds, from the error to the end of the recovery.

    Cost: for each step, one `all_reduce` of 8 bytes, and a copy of the model's parameters and buffers. Also a copy of the
    states of the objects in `stateful`, and of the communication hook's state (its `state_dict()`, if it has one). Every
    `admit_every` steps rank 0 reads the store.

    Raises:
        BackendUnavailableError: the model's group cannot shrink, or the model is not on the CPU.
        InvalidArgumentError: a numeric argument is out of range. Or a batch has fewer samples than there are ranks. Or an
            object in `stateful` lacks `state_dict` or `load_state_dict`.
        MisuseError: an optimizer steps within backward. Or this newcomer differs from the other ranks, or has an optimizer of
            parameters that are not in the model.
    """

    # Note [Applied on all or on none]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    # Before the first `optimizer.step()` of a step the ranks *agree*, by one small `all_reduce`. The loop needs no change for
    # this, because `Elastic` hooks the optimizers.
    #
    # 1. A rank that begins this `all_reduce` has the averaged gradients of the step, which are the same on all ranks.
    # 2. The sum needs every rank. So if one rank has the sum, every rank has begun the `all_reduce`, and every rank that still
    #    runs can apply the step.
    # 3. If a rank dies, the `all_reduce` may succeed on some ranks and fail on others. So after `shrink` the survivors tell
    #    each other how often they have agreed. If a rank has agreed once less than another rank, it was in this `all_reduce`,
    #    has the gradients, and applies the step. If all ranks have agreed equally often, no rank has applied the step, and all
    #    ranks repeat it.
    #
    # The ranks agree once more at the end of an epoch. Otherwise a rank whose last agreement failed would repeat the last step
    # alone, while the other ranks already run an evaluation or have ended.
    #
    # The sum is the number of newcomers that rank 0 knows, so the ranks need no second collective to learn of newcomers. (A
    # barrier in place of the `all_reduce` would cost more: it compares the calls of all ranks, which the end of the backward
    # has just compared.)
    #
    # Before a step is applied, it may already have changed buffers, the random state, a hook's error feedback, and parameters
    # (of a momentum encoder). A GradScaler may leave out `optimizer.step()`; then the ranks agree at the end of the body, when
    # the scaler and schedulers have changed, too. `StepSnapshot` restores all of these before a step is repeated. All backwards
    # of a step come before its first `optimizer.step()`; there may be several backwards, and several optimizers.
    #
    # If an optimizer has not stepped in a step, its gradients may be a part of a sum over several steps. So the next snapshot
    # keeps copies of these gradients, and newcomers get them. These gradients are averages, which are the same on all ranks.
    # Gradients that are not averaged yet would be lost with their rank, so a step must not end with such gradients.

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        sampler: ElasticSampler,
        *,
        stateful: Iterable[Stateful] = (),
        min_ranks: int = 1,
        max_failures: int | None = None,
        silence_timeout_s: float = DEFAULT_SILENCE_TIMEOUT_S,
        give_up_s: float = 300.0,
        admit_every: int = 10,
    ) -> None:
        group = model.join_process_group
        lack = group.missing_for_shrink()
        if lack is not None:
            raise BackendUnavailableError(f"elastic training on {group.place()}: {lack}")
        devices = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
        if devices:
            raise BackendUnavailableError(
                f"elastic training on {group.place()}: the ranks agree on the host, which does not wait for what "
                f"{', '.join(sorted(devices))} still reduces; the model must be on the CPU"
            )
        if admit_every < 1:
            raise InvalidArgumentError(f"expected admit_every of at least 1, found {admit_every}")
        if max_failures is not None and max_failures < 0:
            raise InvalidArgumentError(f"expected max_failures of at least 0, or None for any number, found {max_failures}")
        for name, seconds in (("silence_timeout_s", silence_timeout_s), ("give_up_s", give_up_s)):
            if not seconds > 0:
                raise InvalidArgumentError(f"expected {name} above 0 seconds, found {seconds}")
        # A rank that waits to be let in does not know yet how many ranks there are.
        if not group.is_waiting and not 1 <= min_ranks <= group.size:
            raise InvalidArgumentError(f"expected min_ranks from 1 to the {group.size} ranks of the group, found {min_ranks}")
        self._model = model
        self._group = group
        self._sampler = sampler
        self._min_ranks = min_ranks
        self._max_failures = max_failures
        self._silence_timeout_s = silence_timeout_s
        self._give_up_s = give_up_s
        self._phase = _Phase.BETWEEN_STEPS
        self._snapshot: StepSnapshot | None = None
        self._watch_state: dict[str, Any] = {}
        self._waiting = 0  # how many newcomers wait, as agreed in the latest step
        self._stepped: set[int] = set()  # ids of the optimizers that have stepped in this step
        # Parameters whose gradients the steps so far have accumulated for a later `optimizer.step()`.
        self._accumulated: list[torch.nn.Parameter] = []
        self._agreements = 0
        self.applied_steps = 0
        self._offered: tuple[ProcessGroup, int] | None = None  # while `batches` runs: the group, and the batch's number
        self.lost_ranks: list[int] = []
        self.recovery_s: list[float] = []
        self._members = set(group.members)  # all past and present members that this rank knows
        # None: this group cannot let ranks in, so no rank looks for newcomers.
        self._admit_every = admit_every if group.missing_for_admit() is None else None
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._stateful = _checked(stateful)
        self._state = TrainingState(model, self._optimizers, sampler, self._stateful)
        self._check_no_fused_optimizer()
        if group.is_waiting:
            self._join()
        else:
            sampler.divide(group.rank, group.size)
        self._handles = [each.register_step_pre_hook(self._before_optimizer) for each in self._optimizers]

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, from the sampler's epoch to `number` - 1.

        Use this method in place of `range(number)`. A new training begins with epoch 0. In a newcomer, and after the sampler's
        `load_state_dict`, the first epoch is the present epoch of the training. For each epoch, this method also calls the
        sampler's `set_epoch`.

        If you save a checkpoint at the end of an epoch, call `sampler.set_epoch(epoch + 1)` before you save. Otherwise the
        resumed run begins with the finished epoch: `batches` yields nothing, but the rest of the loop's body, such as the step
        of a scheduler, runs again.
        """
        for epoch in range(self._sampler.epoch, number):
            self._sampler.set_epoch(epoch)
            yield epoch

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this rank's share of each batch of the epoch. Use each share in exactly one `with elastic.step():`.

        A batch comes again if its step was not applied. Batches that were applied before (for example, by the run that saved
        the sampler's state) are left out. All ranks end an epoch together.

        Args:
            loader: an iterable over this rank's shares, in the order of the sampler; usually a `DataLoader`. If the group
                changes, `batches` iterates over the loader again, so `iter(loader)` must begin again. An iterator, such as a
                generator or `map(...)`, cannot begin again.

        Raises:
            MisuseError: the loop's body did not use a batch in `with elastic.step():`, or `close` was called before. Or the
                loader is an iterator, or gives no batch although the epoch has batches left.
        """
        self._refuse_if_closed("batches() was called")
        self._let_newcomers_in()  # the script may have left its latest loop over `batches` after a step
        try:
            while not self._sampler.is_exhausted:
                group = self._group
                is_empty = True
                for batch in _new_pass(loader):
                    is_empty = False
                    applied = self._sampler.applied
                    self._offered = group, applied
                    yield batch
                    self._refuse_if_closed("a batch was taken")
                    self._let_newcomers_in()
                    # The group has changed, so the loader's shares are no longer right: iterate over the loader again.
                    if self._group is not group:
                        break
                    if self._sampler.applied == applied:
                        raise MisuseError(
                            "a batch was taken, and no step: put what is done with it into `with elastic.step():`"
                        )
                # Without this error, the loop would iterate over the empty loader forever.
                if is_empty:
                    raise MisuseError(
                        f"the loader gives no batch, and {len(self._sampler) - self._sampler.applied} batches of the epoch are "
                        "left: pass a DataLoader whose batch_sampler is the ElasticSampler"
                    )
        finally:
            self._offered = None
        self._end_epoch()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for one training step, from the forward to `optimizer.step()`.

        If a rank is lost before the ranks have agreed to apply the step, the context ends without an error. The remaining ranks
        restore the state from before the step, and `batches` yields the batch again. So code after `optimizer.step()` in this
        context runs only if all ranks apply the step.

        Raises:
            RankLostError: on all remaining ranks, if fewer than `min_ranks` are left, or more than `max_failures` were lost.
            RankGivenUpError: the other ranks have gone on without this rank.
            TransportError: a recovery took longer than `give_up_s`.
            MisuseError: this step begins within another step or after `close`, or is the second step for one batch. Or a
                collective failed after the agreement to apply the step. Or the step ends with gradients that are not averaged,
                and that no optimizer has used.
            DisagreementError: the samplers of the ranks have different arguments, or are at different batches. Some backends
                compare the samplers only in the next step.
        """
        self._refuse_if_closed("a step was begun")
        if self._phase is not _Phase.BETWEEN_STEPS:
            raise MisuseError("a step was begun within a step")
        # The sampler has gone on to the next batch, or divides the batch among other ranks.
        if self._offered not in (None, (self._group, self._sampler.applied)):
            raise MisuseError(
                f"a second step was begun for one batch of elastic.batches on {self._group.place()}: use each batch in one "
                "`with elastic.step():`"
            )
        hook_state = self._model.communication_hook[1]
        self._snapshot = StepSnapshot(
            self._model, self._optimizers, self._stateful, hook_state, self._accumulated, earlier=self._snapshot
        )
        self._watch_state = self._model._watch.state()
        self._waiting = 0
        self._stepped.clear()
        self._phase = _Phase.COMPUTING
        self._group.expect_losses(True)
        try:
            with self._refusing_late_losses():
                yield
            accumulated = self._accumulated_gradients()
            self._agree()  # perhaps the body has not called optimizer.step()
            self._accumulated = accumulated  # only now: if the step is repeated, it begins with the earlier list
        # The step is repeated: `batches` gives the same batch again.
        except _NotAppliedError:
            pass
        except TransportError as error:
            # The recovery in an agreement has failed with this error.
            if self._phase is _Phase.BETWEEN_STEPS:
                raise
            self._recover(error)
        finally:
            self._phase = _Phase.BETWEEN_STEPS
            self._group.expect_losses(False)

    @contextmanager
    def _refusing_late_losses(self) -> Iterator[None]:
        try:
            yield
        except TransportError as error:
            # Before the agreement, a lost rank is no error: `step` recovers.
            if self._phase is not _Phase.APPLYING:
                raise
            raise MisuseError(
                f"a collective failed in step {self.applied_steps} on {self._group.place()} after the ranks had agreed to "
                "apply it, so the rest of `with elastic.step():` did not run on this rank, and perhaps on "
                "others. This rank cannot go on. Call collectives before optimizer.step(), or outside of the step. The loss: "
                f"{error}"
            ) from error

    def close(self) -> None:
        """End elastic training. From now on, `optimizer.step()` may run anywhere, and does not make the ranks agree first.

        Raises:
            MisuseError: the call is within a step.
        """
        if self._phase not in (_Phase.BETWEEN_STEPS, _Phase.CLOSED):
            raise MisuseError("close() was called within a step: call it after `with elastic.step():`")
        self._phase = _Phase.CLOSED
        for handle in self._handles:
            handle.remove()

    def _refuse_if_closed(self, what: str) -> None:
        if self._phase is _Phase.CLOSED:
            raise MisuseError(f"{what} after close(): make a new Elastic, or call close() later")

    # ---- the agreement ----

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._phase is _Phase.BETWEEN_STEPS:
            raise MisuseError("optimizer.step() was called outside of `with elastic.step():`")
        self._agree()
        self._stepped.add(id(optimizer))

    def _accumulated_gradients(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients no optimizer has used in this step."""
        idle = [optimizer for optimizer in self._optimizers if id(optimizer) not in self._stepped]
        parameters = [
            p for optimizer in idle for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if parameters and self._model.has_local_gradients:
            raise MisuseError(
                f"step {self.applied_steps} on {self._group.place()} ends with gradients that are not averaged, which a lost "
                "rank would take along: put all backwards of one optimizer's step into one elastic.step()"
            )
        return parameters

    def _agree(self) -> None:
        """Agree with the other ranks to apply the step. See Note [Applied on all or on none]."""
        # For the second optimizer of a step, the ranks have agreed already.
        if self._phase is _Phase.APPLYING:
            return
        self._check_no_fused_optimizer()  # the model's first forward may have taken over such an optimizer
        self._phase = _Phase.AGREEING
        try:
            self._waiting = self._sum_over_ranks(self._newcomers_here())
        except TransportError as error:
            # The agreement may hold although it failed on this rank, because it may have succeeded on another rank.
            if not self._recover(error):
                raise _NotAppliedError from None
        else:
            self._count_step()
        self._phase = _Phase.APPLYING

    def _end_epoch(self) -> None:
        """Agree with the other ranks that the epoch has ended. See Note [Applied on all or on none]."""
        self._phase = _Phase.ENDING_EPOCH
        self._group.expect_losses(True)
        try:
            self._sum_over_ranks(0)
            self._agreements += 1
        except TransportError as error:
            # If the agreement does not hold, no rank has ended the epoch, so the remaining ranks agree again.
            if not self._recover(error):
                self._end_epoch()
        finally:
            self._phase = _Phase.BETWEEN_STEPS
            self._group.expect_losses(False)

    def _sum_over_ranks(self, number: int) -> int:
        mine = torch.tensor([number], device="cpu")
        # With the mark, the ranks compare their samplers. If samplers differ, some samples are used twice, and others never.
        with self._group.marked(self._sampler.batch_in_words()):
            self._group.all_reduce(mine)
        return int(mine)

    def _newcomers_here(self) -> int:
        # Only rank 0 looks, and only if this step may let newcomers in.
        is_time = self._admit_every is not None and (self.applied_steps + 1) % self._admit_every == 0
        if not is_time or self._group.rank != 0 or self._vacancies < 1:
            return 0
        try:
            return self._group.newcomers()
        except StoreError as error:  # the next look finds the newcomers
            logger.warning("the store did not say whether somebody waits to be let in: %s", error)
            return 0

    @property
    def _vacancies(self) -> int:
        # With more newcomers, a rank would get no share of some batch.
        return self._sampler.most_ranks - self._group.size

    def _count_step(self) -> None:
        self._agreements += 1
        self.applied_steps += 1
        self._sampler.advance()
        logger.debug("applied step %d", self.applied_steps)

    # ---- the recovery ----

    def _recover(self, error: TransportError) -> bool:
        """Continue with the remaining ranks. Return whether this rank's latest agreement holds (see `_settle`)."""
        began_s = time.perf_counter()
        logger.info("rank lost or out of reach: %s", error)
        present: dict[int, int] = {}
        try:
            # If another rank is lost during the recovery, the recovery begins again.
            while not present:
                self._check_hope(began_s, error)
                try:
                    present = self._meet(lambda: self._group.shrink(silence_timeout_s=self._silence_timeout_s))
                except TransportError as again:
                    error = again
            self._divide_or_end()
        except BaseException:
            # This rank does not apply the step, so undo it. The script may catch the error and save the model.
            self._undo_step()
            self._phase = _Phase.BETWEEN_STEPS
            raise
        holds = self._settle(max(present.values()))
        self.recovery_s.append(time.perf_counter() - began_s)
        logger.info("went on with %d rank(s) at step %d", len(present), self.applied_steps)
        return holds

    def _meet(self, meet: Callable[[], ProcessGroup]) -> dict[int, int]:
        """Call `meet` to make a new group, make the model use this group, and give newcomers the state of the training.

        If no rank has applied the present step, undo this step. If a rank is lost meanwhile, raise an error. Then the caller
        calls this method again.

        Returns:
            For each member that had a state, the number of agreements in which the member took part.
        """
        old, self._group = self._group, meet()
        is_default = replace_default_group(old, self._group)
        # None marks a newcomer: it gets the state, and cannot give it.
        mine = None if self._is_new else self._agreements
        # Each rank names all members that it knows, so a newcomer learns which ranks were lost before.
        told = exchange_objects((mine, sorted(self._members)), group=self._group)
        agreements = [number for number, _ in told]
        present = {member: number for member, number in zip(self._group.members, agreements, strict=True) if number is not None}
        root = rank_with_state(agreements)
        # Undo the step before the model looks at its parameters: the body may have frozen some of them, on some ranks only.
        if max(present.values()) == self._agreements:
            self._undo_step()
        has_newcomers = None in agreements
        if has_newcomers:
            self._refuse_other_scripts(root)
        self._members.update(self._group.members, *(members for _, members in told))
        self._share_hook_state(root)
        # All ranks take part, but only if there are newcomers, because the state is large.
        if has_newcomers:
            self._share_state(root)
        self._model.update_process_group(None if is_default else self._group)
        return present

    def _settle(self, most_agreements: int) -> bool:
        """Return whether this rank's latest agreement holds: whether it succeeded on at least one rank.

        See Note [Applied on all or on none].

        `most_agreements` is the largest number of agreements in which a rank has taken part.
        """
        # No rank is ahead, so no rank has applied this step, and `_meet` has undone it.
        if most_agreements == self._agreements:
            return False
        # The agreement succeeded on another rank, so it holds on this rank, too.
        if self._phase is _Phase.AGREEING:
            self._count_step()
        elif self._phase is _Phase.ENDING_EPOCH:
            self._agreements += 1
        # This rank is still behind, so another rank has agreed without this rank.
        if most_agreements != self._agreements:
            raise MisuseError(
                f"{self._group.place()} has applied {self.applied_steps} steps, and another rank more: all ranks must take the "
                "same steps, and end epochs together"
            )
        return True

    def _undo_step(self) -> None:
        if self._phase in (_Phase.COMPUTING, _Phase.AGREEING):
            assert self._snapshot is not None
            self._snapshot.restore()
            # The step may have shared new layers. The snapshot has this rank's own values, so the ranks must share them again.
            self._model._watch.restore(self._watch_state)

    def _divide_or_end(self) -> None:
        """Divide the samples among the remaining ranks. If too few ranks are left, end the training on all of them."""
        group = self._group
        self.lost_ranks = sorted(self._members - set(group.members))
        if group.size < self._min_ranks:
            problem = f"{group.size} rank(s) are left, and min_ranks is {self._min_ranks}"
        elif self._max_failures is not None and len(self.lost_ranks) > self._max_failures:
            problem = f"{len(self.lost_ranks)} rank(s) were lost in all, and max_failures is {self._max_failures}"
        else:
            self._sampler.divide(group.rank, group.size)
            return
        raise RankLostError(
            f"the training ends on {group.place()} after {self.applied_steps} applied steps: {problem} (lost: "
            f"{self.lost_ranks}, as they were numbered at first). Start it again from a checkpoint, or allow more",
            self.lost_ranks,
        )

    # ---- newcomers ----

    @property
    def _is_new(self) -> bool:
        return self._phase is _Phase.JOINING

    def _join(self) -> None:
        self._phase = _Phase.JOINING
        known = set(self._model.module.parameters())
        if any(not known.issuperset(group["params"]) for each in self._optimizers for group in each.param_groups):
            raise MisuseError(
                f"an optimizer of this newcomer ({self._group.place()}) has parameters that are not in the model, and a "
                "newcomer gets only the parameters of the model. Put all networks into one module, and wrap that module"
            )
        logger.info("waiting to be let in")
        try:
            present = self._meet(lambda: self._group.admit(silence_timeout_s=self._give_up_s))
        except TransportError as error:
            # This rank was not let in, so it has no group to recover.
            if self._group.is_waiting:
                raise
            self._recover(error)  # another rank was lost after this rank was let in
        else:
            self._divide_or_end()
            logger.info("joined %d rank(s) at step %d", len(present), self.applied_steps)
        self._phase = _Phase.BETWEEN_STEPS

    def _let_newcomers_in(self) -> None:
        """Let newcomers in, if the ranks have agreed in the latest step that newcomers wait. If so, this is a collective.

        Call this method before each batch, because a newcomer begins with a batch.
        """
        if not self._waiting:
            return
        self._waiting = 0
        self._group.expect_losses(True)
        try:
            # Wait for all ranks here. One rank may take long to come, for example because it writes a checkpoint after the
            # step. `admit` would give this rank up after `silence_timeout_s`.
            self._group.barrier()
            # Ranks on which the agreement failed call `shrink`. In `admit` and `shrink`, the ranks take part in the same vote.
            present = self._meet(lambda: self._group.admit(silence_timeout_s=self._silence_timeout_s, limit=self._vacancies))
        except TransportError as error:
            self._recover(error)
        else:
            self._divide_or_end()
            self._settle(max(present.values()))
            logger.info("went on with %d rank(s) at step %d, newcomers among them", self._group.size, self.applied_steps)
        finally:
            self._group.expect_losses(False)

    def _refuse_other_scripts(self, root: int) -> None:
        """A collective. Raise an error if a newcomer's hook, model, optimizers, sampler or `stateful` are not those of `root`.

        Raises:
            MisuseError: on a newcomer that differs. This newcomer then ends.
            RankLostError: on the other ranks, which then call `_meet` again, without this newcomer.
        """
        outline = {"communication hook": _describe_hook(*self._model.communication_hook), **self._state.outline()}
        expected = broadcast_object(outline if self._group.rank == root else None, root, group=self._group)
        different = [what for what in {**expected, **outline} if outline.get(what) != expected.get(what)]
        refused = exchange_objects(self._is_new and bool(different), group=self._group)
        others = [rank for rank, is_refused in enumerate(refused) if is_refused]
        if not others:
            return
        if self._group.rank in others:
            # Name a different parameter first: if parameters differ, the optimizer's groups differ, too.
            what = min(different, key=lambda what: not what.startswith("'"))
            mine, theirs = (found.get(what, "none") for found in (outline, expected))
            raise MisuseError(
                f"this newcomer has {what}: {mine}, and the other ranks {theirs}: make the same before Elastic(...)"
            )
        raise RankLostError(
            f"newcomer(s) {others} on {self._group.place()} end: their hook, model, optimizers, sampler or objects in "
            "stateful= differ",
            others,
        )

    def _share_state(self, root: int) -> None:
        """A collective. Give newcomers the state of `root`. Other ranks keep their states."""
        mine = (
            (self._state.collect(self._accumulated), self._agreements, self.applied_steps) if self._group.rank == root else None
        )
        state, agreements, applied = broadcast_object(mine, root, group=self._group)
        if self._is_new:
            self._accumulated = self._state.load(state)
            self._agreements, self.applied_steps = agreements, applied
            self._phase = _Phase.BETWEEN_STEPS  # no longer a newcomer

    def _share_hook_state(self, root: int) -> None:
        """Give all ranks the hook's state of `root`, if this state can be saved. If so, this is a collective."""
        state = HookState(self._model.communication_hook[1])
        if state.can_be_saved:
            state.load(broadcast_object(state.collect() if self._group.rank == root else None, root, group=self._group))
            if self._is_new:
                logger.info("the hook's state is that of the others; what its error feedback keeps begins at zero")

    # ---- checks ----

    def _check_no_fused_optimizer(self) -> None:
        if self._model.fused_optimizer.optimizers:
            raise MisuseError(
                "elastic training with an optimizer that steps within backward: a step could be applied on some ranks only. "
                "Call optimizer.step() after backward instead"
            )

    def _check_hope(self, began_s: float, error: TransportError) -> None:
        if isinstance(error, NO_RECOVERY):
            raise error
        if time.perf_counter() - began_s > self._give_up_s:
            raise TransportError(
                f"the training ends on {self._group.place()} after {self.applied_steps} applied steps: the ranks "
                f"did not come together again within {self._give_up_s:g} s (give_up_s). The last problem: {error}"
            ) from error


def _new_pass(loader: Iterable[Batch]) -> Iterator[Batch]:
    iterator = iter(loader)
    # An iterator cannot begin again. After a rank is lost, it would leave out batches that were not applied, and give old
    # shares. For some loaders (Lightning's `CombinedLoader`), `iter` also returns the loader itself. But these loaders begin
    # again, and have a length.
    if iterator is loader and not hasattr(loader, "__len__"):
        raise MisuseError(
            f"expected a loader that can begin again, such as a DataLoader, found an iterator ({type(loader).__name__}): pass "
            "the loader itself to batches(), and change the batches in the loop's body"
        )
    return iterator


def _describe_hook(hook: Callable[..., Any] | None, state: object) -> str:
    if hook is None:
        return "none"
    return f"{name_of_hook(hook)}({type(state).__qualname__})"


def _checked(stateful: Iterable[Stateful]) -> list[Stateful]:
    found = list(stateful)
    for each in found:
        if not can_be_saved(each):
            raise InvalidArgumentError(
                f"expected stateful things with state_dict and load_state_dict, found {type(each).__name__}"
            )
    return found
