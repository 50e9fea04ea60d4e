"""DistributedDataParallel wraps a module and keeps its replicas equal on all ranks."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from syncline.collectives import DisagreementError, InvalidArgumentError, MisuseError, ProcessGroup, exchange_objects
from syncline.collectives.internal import disable_dynamo, disable_dynamo_here
from syncline.reducer import GradBucket, IterationStatistics, Reducer, telling_the_others, verify_same_options
from syncline.reducer.torch_internals import hookable

from . import arguments, logging_data, torch_internals
from .bucket_tuning import BucketTuning, check_can_tune, measuring_caps
from .buffers import Buffers
from .compatibility import TorchNames, ignored_names
from .fused_optimizer import AverageHook, AverageHooks, FusedOptimizer
from .hook_annotations import check_hook
from .iteration_listeners import IterationListeners, Listener
from .join import Join, Joinable
from .mixed_precision import MixedPrecision, as_mixed_precision, average_in, lower_precision
from .model_watch import ModelWatch
from .module_state import ModuleState, broadcast_tensors
from .new_parameters import NewParameters
from .process_groups import as_ours, choose_default_group, choose_group, is_default_group
from .replica_check import EVERY_VARIABLE as CHECK_EVERY
from .replica_check import ReplicaCheck
from .stragglers import StragglerWatch, checked_every, every_from
from .sync_batch_norm import refuse_layers_that_see_one_rank
from .tracing import TraceRecording, TraceSettings, fixed_folder, settings_from
from .uneven_inputs import Replica, UnevenInputs

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.nn.parallel.distributed import _MixedPrecision

logger = logging.getLogger("syncline.ddp")

# Attributes that a copied or pickled model does not take along.
_OF_THIS_PROCESS = frozenset(
    {
        "process_group",
        "_group",
        "_reducer",
        "_watch",
        "_join",
        "_uneven_inputs",
        "_listeners",
        "_recordings",
        "_straggler_watch",
        "_replica_check",
        "_average_hooks",
        "_bucket_tuning",
        "_new_parameters",
        "_requires_grad_sync",
    }
)


class DistributedDataParallel(TorchNames, Joinable, torch.nn.Module):
    """Wraps a module so that each backward averages the gradients over all ranks.

    Every rank builds the same module and wraps it. The constructor gives all ranks the parameters and buffers of rank 0. Each
    rank computes with its own part of the batch. After `loss.backward()` all ranks have the same gradients, bit for bit: the
    gradients of the mean of the ranks' losses. If all ranks use the same optimizer and options, their replicas stay equal.
    (After `join`, the optimizers' states may differ; see `join`.)

    The arguments have the names and the order of torch's DDP. The page "Differences from torch" lists the arguments whose
    meaning differs.

    Args:
        module: the module. Every backward must compute a gradient for every trainable parameter, unless
            `find_unused_parameters` or `static_graph` is True.
        device_ids: a list with one entry, the module's device. A forward moves its inputs to this device. None: inputs stay on
            their devices. For a module on the CPU, pass None.
        output_device: deprecated; None, or the device in `device_ids`.
        dim: deprecated; must be 0.
        broadcast_buffers: deprecated; whether to broadcast buffers at construction and in forwards. Has no effect if
            `forward_sync_buffers` is given.
        init_sync: whether the constructor compares the modules of all ranks and copies rank 0's state to all ranks. Pass False
            only if the modules are equal.
        process_group: a group of Syncline or of torch.distributed. None: Syncline's default group, or else torch's. If there is
            no default group, the constructor calls Syncline's `init_process_group()`.
        bucket_cap_mb: the approximate size of a bucket of gradients in MiB. None: 25, but 1 for the first bucket. "auto": DDP
            measures about ten steps, then chooses sizes; see `tuned_bucket_cap_mb`.
        find_unused_parameters: True: a backward may leave out parameters, and each rank may leave out different parameters. If
            a parameter gets no gradient on any rank, it keeps its previous `grad`.
        check_reduction: deprecated; has no effect.
        gradient_as_bucket_view: True makes each `parameter.grad` a view of its bucket. These views save one copy of all
            gradients, in time and in memory. Do not call `detach_()` on these gradients.
        static_graph: True promises that every backward uses the same graph as the first backward. Re-entrant checkpoints and
            unused parameters are then allowed.
        delay_all_reduce_named_params: pairs of a name and a parameter. A backward may compute any number of gradients for these
            parameters. DDP averages their gradients last, after the gradient of `param_to_hook_all_reduce` is ready.
        param_to_hook_all_reduce: the parameter whose gradient must be ready before DDP averages the gradients of
            `delay_all_reduce_named_params`.
        mixed_precision: a `MixedPrecision` of Syncline or of torch.
        device_mesh: a one-dimensional mesh, in place of `process_group`.
        skip_all_reduce_unused_params: do not reduce a bucket if no rank uses any parameter of this bucket. Requires
            `find_unused_parameters`.
        bucket_cap_mb_list: the sizes in MiB of the first, second, ... bucket, in place of `bucket_cap_mb`. All further buckets
            have the last size.
        batched_grad_copy: has no effect.
        forward_sync_buffers: whether forwards broadcast buffers; see `forward`. None: the same as True, unless
            `broadcast_buffers` is False. If True or False is given, the constructor also broadcasts buffers (unless `init_sync`
            is False).
        lazy_bucket_allocation: an argument of torch 2.15. True only causes a warning.

    If `init_sync` is True, the constructor is a collective: two all_reduces of 16 bytes, and broadcasts of the module's state
    in buffers of at most 250 MiB. (A larger tensor has a buffer of its own.) The first forward whose backward averages
    gradients is also a collective.

    Raises:
        MisuseError: a parameter or buffer is uninitialised, is sparse, is on a device that the group's backend cannot use, or
            has elements that share memory. Or no parameter requires a gradient. Or the module has a SyncBatchNorm of torch
            while torch.distributed is not initialised: such a layer would normalise each rank's batch separately.
        DisagreementError: on all ranks, if modules or arguments differ between ranks. The text names the first difference. If
            one rank raises a `MisuseError`, the other ranks raise a `DisagreementError` that names this rank and its error.
        InvalidArgumentError: an argument is wrong, or two arguments contradict each other.
    """

    _uneven_inputs: UnevenInputs | None = None
    _requires_grad_sync = True
    _has_warned_of_hooks = False
    _new_parameters: NewParameters | None = None  # until an averaged backward, or until a forward follows the change

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | dist.ProcessGroup | None = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: MixedPrecision | _MixedPrecision | None = None,
        device_mesh: object | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        super().__init__()
        arguments.check_module(module)
        arguments.check_deprecated(dim, check_reduction)
        arguments.check_lazy_bucket_allocation(lazy_bucket_allocation)
        sync_buffers_at_first, forward_sync_buffers = arguments.buffer_synchronization(broadcast_buffers, forward_sync_buffers)
        self.mixed_precision = as_mixed_precision(mixed_precision)
        self._tunes_buckets = arguments.tunes_buckets(bucket_cap_mb, bucket_cap_mb_list)
        self._lists_bucket_caps = bucket_cap_mb_list is not None
        self._bucket_caps_bytes = arguments.bucket_caps_bytes(
            None if self._tunes_buckets else bucket_cap_mb, bucket_cap_mb_list
        )
        self.parameters_to_ignore = ignored_names(module)
        self._state = ModuleState(module, self.parameters_to_ignore)
        self.process_group = choose_group(process_group, device_mesh)
        self._group = as_ours(self.process_group)
        # A copy can find only a default group again; see `__getstate__`.
        self._is_default_group = device_mesh is None and is_default_group(self.process_group, self._group)
        self.device_mesh = device_mesh
        # If a check fails on one rank, the other ranks raise an error, too, in `_verify_options`.
        with telling_the_others(self._group) if init_sync else nullcontext():
            self._state.check(self._group, buffers=sync_buffers_at_first or forward_sync_buffers)
            refuse_layers_that_see_one_rank(module, self._group)
            parameters = self._state.trainable_parameters()
            self._input_device = arguments.placement(device_ids, output_device, [p for _, p in self._state.parameters()])
            self._delayed, self._delayed_until = arguments.delayed_names(
                delay_all_reduce_named_params, param_to_hook_all_reduce, parameters
            )
            trace_settings, stragglers_every = settings_from(os.environ), every_from(os.environ)
            check_every = every_from(os.environ, CHECK_EVERY)
        self.module = module
        # `bool`, because a script may pass a boolean of NumPy, which the comparison of options cannot encode.
        self.gradient_as_bucket_view = bool(gradient_as_bucket_view)
        self.find_unused_parameters = bool(find_unused_parameters)
        self.skip_all_reduce_unused_params = bool(skip_all_reduce_unused_params)
        self.static_graph = bool(static_graph)
        self.batched_grad_copy = bool(batched_grad_copy)
        self.lazy_bucket_allocation = bool(lazy_bucket_allocation)
        self.dim = dim
        self.device = parameters[0][1].device
        self.device_ids = None if self._input_device is None else [self._input_device.index]
        self.output_device = None if self._input_device is None else self._input_device.index
        self._buffer_sync = Buffers(self._state, enabled=forward_sync_buffers)
        self._builtin_hook: dist.BuiltinCommHookType | None = None
        self._runtime = logging_data.RuntimeSamples()
        self.fused_optimizer = FusedOptimizer()
        self._sync_buffers_at_first = sync_buffers_at_first
        if init_sync:
            # Compare the options first, because they decide which collectives follow.
            self._verify_options(sync_buffers_at_first, trace_settings, stragglers_every, check_every)
            self._state.verify(self._group, buffers=sync_buffers_at_first)
            self._state.broadcast(self._group, 0, buffers=sync_buffers_at_first)
        self._init_sync = init_sync
        # Do this after the broadcast, because the broadcast carries buffers in their original dtype.
        self._low_precision = lower_precision(self.mixed_precision, self._state)
        self._listeners = IterationListeners()
        self._recordings: list[TraceRecording] = []
        self._straggler_watch: StragglerWatch | None = None
        self._replica_check: ReplicaCheck | None = None
        self._average_hooks = AverageHooks(self.fused_optimizer)
        self._bucket_tuning: BucketTuning | None = None
        self._reducer = self._make_reducer(self._group)
        self._tune_buckets()
        if trace_settings is not None:
            self._start_recording(trace_settings, only_first=True)
        if stragglers_every is not None:
            self.watch_stragglers(stragglers_every)
        if check_every is not None:
            self.check_replicas(check_every)

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether forwards synchronise the buffers, so that all ranks compute with the same buffers. See `forward`.

        If you assign a value, assign it on every rank, after the same number of forwards.
        """
        return self._buffer_sync.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._buffer_sync.enabled = value

    @property
    def broadcast_buffers(self) -> bool:
        """The same value as `forward_sync_buffers`, under its older name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of the next forward averages gradients. `no_sync` sets the value to False.

        If False, this backward only adds to this rank's gradients.
        """
        return self._requires_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._requires_grad_sync = value
        self._reducer.keep_local(not value)

    # In torch.compile(ddp) the compiler gets only the module: the code around the module communicates and cannot be traced.
    @disable_dynamo_here
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. All ranks must run the same number of forwards, except within `join`.

        The backward averages gradients over the ranks, unless the forward runs inside `no_sync`.

        If `forward_sync_buffers` is True, the first forward begins with a broadcast of rank 0's buffers (within `join`: the
        buffers of the highest rank that has inputs). As in torch, a later forward broadcasts buffers only if the backward of
        the previous forward averages gradients.
        """
        has_backward = torch.is_grad_enabled()
        will_reduce = has_backward and self.require_backward_grad_sync
        inputs, kwargs, pending, trains = self._before_forward(inputs, kwargs, has_backward, will_reduce)
        try:
            outputs = self.module(*inputs, **kwargs) if self._low_precision is None else self._low_precision(inputs, kwargs)
        # Catch Ctrl-C, too. Otherwise the reducer would take the next backward for the backward of the failed forward.
        except BaseException:
            self._cancel_forward(trains, will_reduce)
            raise
        self._after_forward(outputs, pending, trains, will_reduce)
        return outputs

    @disable_dynamo
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], has_backward: bool, will_reduce: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.futures.Future[Any]], bool]:
        """Prepare a forward, and move its inputs to the module's device.

        Return the inputs, the futures for which the end of backward waits, and whether a backward can follow.
        """
        # The script may have assigned another module to `self.module`.
        self._state.module = self.module
        if has_backward and self._new_parameters is not None and self._new_parameters.has_gradient:
            self._check_new_parameters()
        trains = has_backward and self._watch.needs_gradients()
        if (has_backward or self.mixed_precision is not None) and self._watch.is_due(self._reducer.reductions):
            if has_backward:
                trains = self._follow_module(within_join=self._join is not None)
            # A forward without gradients averages nothing, so a later forward follows the change, on all ranks. But this
            # forward must already run with the module's present parameters and buffers.
            else:
                self._low_precision = lower_precision(self.mixed_precision, self._state)
        try:
            # This is the first collective of a forward, because ranks without inputs wait for it.
            root = self._sync_with_joined_ranks(will_reduce and trains)
            pending = self._buffer_sync.before_forward(self._group, root)
            if trains:
                if will_reduce:
                    self._runtime.forward_begins(self._reducer.statistics)
                # Do this in each forward, because the script may attach optimizers after construction.
                self.fused_optimizer.adopt(self._reducer.parameters, self._reducer.reductions)
                self._reducer.prepare_for_backward(synchronizes=will_reduce)
        except DisagreementError as error:
            raise self._reducer.explained(error, "a forward of the wrapped module") from error.__cause__
        try:
            if trains and self._reducer.has_users_hooks and not self._has_warned_of_hooks:
                self._warn_of_users_hooks()
            if self._input_device is not None:
                inputs, kwargs = torch_internals.moved_to(self._input_device, inputs, kwargs)
        # After an error here, such as a lack of GPU memory, the forward has failed.
        except BaseException:
            self._cancel_forward(trains, will_reduce)
            raise
        return inputs, kwargs, pending, trains

    def _warn_of_users_hooks(self) -> None:
        self._has_warned_of_hooks = True
        warnings.warn(self._reducer.users_hooks_in_words(), stacklevel=7)  # the script's call of the model

    def _follow_module(self, *, within_join: bool = False) -> bool:
        """Average the gradients of the module's present parameters from now on. Return whether a parameter requires a gradient.

        If the module has changed and `init_sync` is True, this is a collective.
        """
        watch = self._watch
        self._forget_new_parameters()
        if not watch.has_changed():
            if watch.has_sign:  # parameters may have been converted, and converted back: then they have new nodes
                refuse_layers_that_see_one_rank(self.module, self._group)  # a new layer may have no parameters
                self._reducer.find_nodes_again()
                # There may be new modules without parameters, which may get parameters later, and may have buffers.
                watch.take_note_of_structure()
                self._buffer_sync.look_again()
            return watch.needs_gradients()
        parameters = [(name, parameter) for name, parameter in self._state.parameters() if parameter.requires_grad]
        if not parameters:  # all are frozen, so average nothing; `has_sign` stays set, so a later forward looks again
            return False
        new = watch.new()
        names = ", ".join(f"'{name}'" for name, _ in new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
        what = f"the module has changed since it was wrapped ({f'new parameters: {names}' if new else 'none are new'})"
        # A rank without inputs issues the collectives of the old module, which would not match those of the changed module.
        if within_join:
            raise MisuseError(
                f"{what}, within join() on {self._group.place()}: ranks without inputs cannot follow. Change it before"
            )
        if not self._init_sync:
            self._check_change(self._group)
        else:
            try:
                self._share_new(new)
            except DisagreementError as error:
                raise error.reworded(
                    f"{what} on {self._group.place()}: make the same change on every rank, before the same forward.\n{error}"
                ) from error.__cause__
        logger.info("%s: buckets are built anew", what)
        sparse = self._state.sparse_parameters()
        if self._tunes_buckets:
            self._bucket_caps_bytes = measuring_caps(sum(parameter.nbytes for _, parameter in parameters))
        self._reducer.change_parameters(
            parameters,
            sparse=[id(p) in sparse for _, p in parameters],
            bucket_cap_bytes=self._bucket_caps_bytes,
            **self._delayed_among(parameters),
        )
        self._low_precision = lower_precision(self.mixed_precision, self._state)
        self._buffer_sync.look_again()
        self.device = parameters[0][1].device
        # Do this last: if a line above raises an error, the next forward finds the change again.
        watch.take_note()
        self._tune_buckets()
        return True

    def _share_new(self, new: Sequence[tuple[str, torch.Tensor]]) -> None:
        """A collective. Copy the values of the new parameters and buffers from rank 0 to all ranks."""
        syncs_buffers = self._sync_buffers_at_first
        with self._group.marked("the module has changed"):
            # If a check fails on one rank, the other ranks raise an error in `verify`.
            with telling_the_others(self._group):
                self._check_change(self._group)
            self._state.verify(self._group, buffers=syncs_buffers)
        sparse = self._state.sparse_parameters()
        options = {
            "new parameters": [name for name, _ in new],
            "sparse=True (in embeddings)": [name for name, parameter in self._state.parameters() if id(parameter) in sparse],
        }
        verify_same_options(options, group=self._group)
        broadcast_tensors([*new, *(self._watch.new_buffers() if syncs_buffers else [])], self._group, 0)

    def _check_change(self, group: ProcessGroup) -> None:
        self._state.check(group, buffers=self._sync_buffers_at_first or self.forward_sync_buffers)
        refuse_layers_that_see_one_rank(self.module, group)
        unreduced = self._reducer.unreduced()
        for name, parameter in self._state.parameters():
            # The optimizer would step this parameter with the gradient of this rank alone.
            if name in unreduced and not parameter.requires_grad and parameter.grad is not None:
                raise MisuseError(
                    f"parameter '{name}' was frozen on {self._group.place()}, but its gradient is not averaged: freeze it "
                    "after an averaged backward, or set its gradient to None"
                )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DistributedDataParallel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        # Parameters may be new objects now, with new nodes in the graph.
        self._watch.has_sign = True
        return self

    @disable_dynamo
    def _cancel_forward(self, trains: bool, will_reduce: bool) -> None:
        if trains:
            self._reducer.cancel_forward()
        self._buffer_sync.forward_failed(will_reduce)

    @disable_dynamo
    def _after_forward(self, outputs: Any, pending: list[torch.futures.Future[Any]], trains: bool, will_reduce: bool) -> None:
        # Do this after the forward, which may have set layers to evaluation mode.
        if torch.is_grad_enabled():
            self._buffer_sync.note_modes(outputs, self._reducer.reductions)
        pending += self._buffer_sync.after_forward()
        self._buffer_sync.forward_ended(will_reduce)
        if will_reduce:
            self._note_new_parameters()
        if trains and will_reduce:
            statistics = self._reducer.statistics
            if not statistics.backward_started:  # a checkpoint may run the forward again, within its backward
                statistics.forward_ended = time.perf_counter()
            self._reducer.wait_at_end(pending)
        # No backward of this forward waits for the futures of the buffer hook, so wait here.
        elif pending:
            torch.futures.wait_all(pending)

    def _note_new_parameters(self) -> None:
        """If the forward has added or unfrozen parameters, look whether one of them gets a gradient in its backward."""
        new = self._watch.new_within_forward()
        if new and self._new_parameters is None:
            self._new_parameters = NewParameters(new)
            # A backward that reaches no other parameter averages nothing. So the next forward checks, too.
            self._tell(self._check_new_parameters)

    def _check_new_parameters(self, _: object = None) -> None:
        new = self._new_parameters
        self._forget_new_parameters()
        if new is not None:
            new.check(self._group.place())

    def _forget_new_parameters(self) -> None:
        if self._new_parameters is not None:
            self._new_parameters.close()
            self._new_parameters = None
            self._tell_no_more(self._check_new_parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for gradient accumulation: add gradients up on each rank, without averaging them over the ranks.

        Run forward and backward inside the context for all micro-batches but the last. Run the last forward and backward
        outside: this backward averages the accumulated gradients. Backwards that do not average do not communicate. Contexts
        may be nested.

        As in torch, the place of the forward decides. If a forward runs inside the context, its backward does not average, even
        after the context. There is one exception: after a forward outside of the context, the next backward averages, even if
        it belongs to a forward inside the context.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def has_local_gradients(self) -> bool:
        """Whether gradients of this rank wait for averaging, such as after a backward in `no_sync`.

        A backward without averaging sets the value to True, and this rank's next backward with averaging sets it to False.
        `zero_grad` does not change the value. Within `join()`, backwards of other ranks do not change the value of a rank
        without inputs. Hooks may read the value during a backward.
        """
        return self._reducer.has_local_gradients

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """A context around a training loop in which ranks may have different numbers of inputs. See `Join`.

        At the end, all ranks get the parameters and buffers of a rank that had the most inputs. But each rank keeps the state
        of its optimizer, such as momentum. So if you use the optimizer after the context, first give all ranks the optimizer
        state of a rank that had the most inputs. Otherwise the replicas drift apart, as with torch's DDP.

        Args:
            divide_by_initial_world_size: True: divide gradients by the number of all ranks. False: divide by the number of
                ranks that still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: True: raise an error on all ranks when one rank has no inputs left. False: a rank
                without inputs takes part in the collectives of the other ranks.
        """
        return Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size)

    def join_hook(self, **kwargs: Any) -> UnevenInputs:
        """Return the hook that calls the module's collectives on this rank after this rank has run out of inputs.

        `Join` calls this method on every rank at the start of the context. `kwargs` may contain
        `divide_by_initial_world_size`; see `join`.
        """
        divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        # All ranks enter the context, so here all can follow a change of the module. Later, ranks without inputs cannot.
        self._state.module = self.module
        self._follow_module()
        replica = Replica(self.module, self._state, self._buffer_sync, self._reducer, self._group, self.device)
        throws = self._join is not None and self._join.throws
        self._uneven_inputs = UnevenInputs(replica, divide_by_initial_world_size=divide_by_initial_world_size, throws=throws)
        self._stop_counting_steps_together()
        return self._uneven_inputs

    @property
    def join_device(self) -> torch.device:
        """The module's device."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group over which gradients are averaged."""
        return self._group

    def _sync_with_joined_ranks(self, will_reduce: bool) -> int:
        """Return the rank whose buffers all ranks get. In a join context, this is a collective."""
        present = Join.notify_join_context(self)
        # Outside of a join context every rank has inputs, so all ranks get rank 0's buffers.
        if present is None or self._uneven_inputs is None:
            return 0
        return self._uneven_inputs.before_forward(present, will_reduce=will_reduce)

    def update_process_group(self, process_group: ProcessGroup | dist.ProcessGroup | None) -> None:
        """From now on, average gradients over the ranks of another group. The new group may have more, fewer or other ranks.

        Every rank of the new group calls this method. Before the call, give each new rank the parameters and buffers of the
        other ranks: the method compares no values. The method copies values in one case: a script has added, replaced or
        unfrozen parameters, and has run no forward with gradients since then. In this case, all ranks get rank 0's values of
        these parameters. If the constructor has broadcast the buffers, all ranks also get rank 0's values of new buffers. If
        `init_sync` is False, the method copies nothing.

        The communication hook stays registered. If the hook's state holds the old group, register the hook with a new state. A
        running `trace` ends. `watch_stragglers` and `check_replicas` go on if all ranks of the new group have the same `every`,
        and count steps from 1 again. If gradients wait for averaging, such as after a backward in `no_sync`, the first backward
        with averaging in the new group also averages these gradients.

        Args:
            process_group: the new group, of Syncline or of torch.distributed. None: the default group, as in the constructor.

        Raises:
            DisagreementError: on all ranks, if parameters differ between ranks in name, shape, strides or dtype, or in which of
                them are frozen. With `forward_sync_buffers`, buffers are compared, too. Or another rank has raised a
                `MisuseError` for its module.
            MisuseError: the call is within `join()`. Or the new group cannot send a parameter or buffer. Or this rank has
                frozen a parameter whose gradient is not averaged yet. Or the new group has several ranks, and the module has a
                SyncBatchNorm of torch while torch.distributed is not initialised.

        After an error, the model keeps its old group.
        """
        if self._join is not None:
            raise MisuseError(
                "update_process_group within join(): leave the context first, for its ranks are those of the group"
            )
        chosen = choose_group(process_group)
        group = as_ours(chosen)
        # Perhaps no forward has run since the latest change of the module.
        self._state.module = self.module
        # If a check fails on one rank, the other ranks raise an error in `verify_same_options`.
        with telling_the_others(group):
            self._check_change(group)
            # Do this before the comparison: new ranks have converted the buffers in the constructor.
            low_precision = lower_precision(self.mixed_precision, self._state)
        verify_same_options({}, group=group)
        self._verify_and_share_new(group)
        stragglers_every, check_every = self._intervals_of(group)
        hook, state = self._reducer.hook
        # If this fails, the model keeps its old group and its old reducer.
        reducer = self._make_reducer(group, unreduced=self._reducer.unreduced())
        self._reducer.close()
        self._stop_counting_steps_together()
        # Ranks of the old group may be gone, so do not merge the trace files: each rank only closes its file.
        for recording in self._recordings:
            recording.abandon()
        self._uneven_inputs = None  # it holds the old reducer
        self.process_group, self._group = chosen, group
        self._is_default_group = is_default_group(chosen, group)
        self._low_precision = low_precision
        self.device = next((p.device for _, p in self._state.parameters() if p.requires_grad), self.device)
        self._reducer = reducer
        self._reducer.set_hook(hook, state)
        # Let the next forward synchronise the buffers on all ranks. Buffers may be due only on some ranks: a new rank has run
        # no forward.
        self._buffer_sync.look_again()
        self._buffer_sync.are_stale = True
        self._tune_buckets()
        # All ranks count steps from 1 again, so all ranks have the same numbers.
        if stragglers_every is not None:
            self.watch_stragglers(stragglers_every)
        if check_every is not None:
            self.check_replicas(check_every)

    def _verify_and_share_new(self, group: ProcessGroup) -> None:
        """A collective of the new group. Compare the modules, and copy rank 0's values of new tensors to all ranks.

        `ModelWatch.new` and `ModelWatch.new_buffers` say which tensors are new.
        """
        mine = []
        # If no parameter has changed, a forward may have made the new buffers. Each rank keeps its own buffers, as in a
        # forward.
        if self._init_sync and self._watch.has_changed():
            mine += [name for name, _ in self._watch.new()]
            mine += [name for name, _ in self._watch.new_buffers()] if self._sync_buffers_at_first else []
        # For a new rank, which has wrapped the changed module, nothing is new.
        names = {name for said in exchange_objects(mine, group=group) for name in said}
        new_buffers = [(name, buffer) for name, buffer in self._state.buffers() if name in names]
        self._state.verify(group, buffers=self.forward_sync_buffers or bool(new_buffers))
        new = [(name, parameter) for name, parameter in self._state.parameters() if name in names]
        broadcast_tensors([*new, *new_buffers], group, 0)

    def _intervals_of(self, group: ProcessGroup) -> list[int | None]:
        """Return the `every` of `watch_stragglers` and of `check_replicas` for a new group. A collective of the group.

        If the ranks of the new group have different numbers, None takes the place of the number.
        """
        mine = [None if watch is None else watch.every for watch in (self._straggler_watch, self._replica_check)]
        said = exchange_objects(mine, group=group)
        found: list[int | None] = []
        for index, name in enumerate(("watch_stragglers", "check_replicas")):
            numbers = [given[index] for given in said]
            is_common = len(set(numbers)) == 1
            found.append(numbers[0] if is_common else None)
            if not is_common and group.rank == 0:
                listed = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(numbers))
                logger.warning("%s ends, because the ranks of the new group have different intervals (%s)", name, listed)
        return found

    @property
    def communication_hook(self) -> tuple[Any, Any]:
        """The communication hook and its state, as a pair. Without a hook, both items are None.

        If `mixed_precision` sets a dtype for averaging, the hook is the function of Syncline that averages in this dtype.
        """
        return self._reducer.hook

    def register_comm_hook(self, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]) -> None:
        """Make `hook(state, bucket)` reduce the gradients of each bucket over the ranks, in place of DDP's average.

        Every rank registers the same hook. Another call replaces the hook.

        Args:
            state: the first argument of each call of the hook.
            hook: a function that gets a bucket with this rank's gradients, not divided by the number of ranks. The function
                returns a future of one flat tensor, the reduced gradients. This tensor must be the same on every rank.

        Raises:
            InvalidTypeError: the hook is not callable.
            InvalidArgumentError: the hook's annotations name another type for the bucket or for the result.
            MisuseError: a backward is running or has failed. Or `mixed_precision` sets a dtype for averaging, so no other hook
                is allowed.
        """
        self._check_no_wire_dtype()
        try:
            check_hook(hook)
        except InvalidArgumentError as error:
            self._reducer.note_error(error)
            raise
        self._reducer.set_hook(hook, state)
        self._builtin_hook = None

    def register_post_average_grad_hook(self, hook: AverageHook) -> RemovableHandle:
        """Call `hook(parameter)` in backward, as soon as `parameter.grad` is the average over the ranks.

        For example, the hook may step an optimizer, or clip or log the gradient. The hook may set `parameter.grad` to None. The
        hook must not communicate. The hook runs on the thread of backward. A backward that does not average (see `no_sync`)
        does not call the hook. A backward that averages does not call the hook for parameters that no rank used.

        Returns:
            A handle. Call `remove()` of this handle to unregister the hook.

        Raises:
            InvalidTypeError: the hook is not callable.
        """
        return self._average_hooks.add(hook)

    # ---- looking at steps ----

    @contextmanager
    def trace(self, folder: str | Path, first: int = 1, last: int | None = None) -> Iterator[None]:
        """A context that records where the time of each training step goes. To enter or to leave the context is a collective.

        Each rank writes a file in the folder. After the last step, rank 0 merges the files into `trace.json`. Open this file in
        ui.perfetto.dev, or show tables of the steps with `syncline report`. The environment variable `SYNCLINE_TRACE` starts a
        trace without a change to the script.

        Args:
            folder: the folder for the files. A missing folder is created. A relative path counts from the working directory at
                the beginning of the context.
            first: the first traced step. A step is a backward that averages gradients. The first step in the context is step 1.
            last: the last traced step. None: trace all steps from `first` on.

        Raises:
            MisuseError: the script enters the context within `join()`.
            InvalidArgumentError: `first` is below 1 or above `last`.
        """
        if self._join is not None:
            raise MisuseError(f"trace on {self._group.place()} within join(): enter it before, around join()")
        if first < 1 or (last is not None and last < first):
            raise InvalidArgumentError(f"trace: expected 1 <= first <= last, found first={first}, last={last}")
        recording = self._start_recording(TraceSettings(fixed_folder(folder), first, last))
        try:
            yield
        except BaseException:
            # Other ranks may have no error, so this rank must not enter a collective: it only closes its file.
            recording.abandon()
            raise
        finally:
            self._tell_no_more(recording.note_step)
            self._recordings.remove(recording)
        recording.finish()

    def watch_stragglers(self, every: int) -> None:
        """Find slow ranks: after every `every` steps, rank 0 logs which rank was last in the most steps.

        A rank is last in a step if its last gradient comes later than the last gradients of all other ranks. The line in
        the log says in how many steps this rank was last, and the median of its delays.

        Every rank calls this method with the same number. Instead, you can set the number in the environment variable
        `SYNCLINE_STRAGGLERS`. When a join context begins, rank 0 stops logging these lines. After `update_process_group`, rank
        0 goes on if all ranks of the new group have the same number.

        Args:
            every: the number of steps between two lines of the log. A step is a backward that averages gradients.

        Cost: for every `every` steps, an all-gather of `8 * every` bytes from each rank.

        Raises:
            InvalidArgumentError: `every` is below 1.
        """
        self._stop_watching_stragglers()
        self._straggler_watch = StragglerWatch(self._group, checked_every(every, "every"))
        self._tell(self._straggler_watch.note_step)

    def _stop_watching_stragglers(self) -> None:
        if self._straggler_watch is not None:
            self._tell_no_more(self._straggler_watch.note_step)
            self._straggler_watch = None

    def check_replicas(self, every: int) -> None:
        """Detect replicas that have drifted apart: every `every` steps, the ranks compare their parameters.

        If parameters differ, the backward of this step raises a `DisagreementError` on all ranks. The error names the first
        parameter that differs. Otherwise training continues. Buffers are not compared.

        Every rank calls this method with the same number. Instead, you can set the number in the environment variable
        `SYNCLINE_CHECK_REPLICAS`. When a join context begins, the ranks stop checking. After `update_process_group`, the ranks
        go on if all ranks of the new group have the same number.

        Args:
            every: the number of steps between two checks. A step is a backward that averages gradients.

        Cost: a check reads all parameters once, and all-reduces 16 bytes.

        Raises:
            InvalidArgumentError: `every` is below 1.
        """
        self._stop_checking_replicas()
        self._replica_check = ReplicaCheck(self._group, self._state, checked_every(every, "every"))
        self._tell(self._replica_check.note_step)

    def _stop_checking_replicas(self) -> None:
        if self._replica_check is not None:
            self._tell_no_more(self._replica_check.note_step)
            self._replica_check = None

    @property
    def tuned_bucket_cap_mb(self) -> list[float] | None:
        """The two sizes in MiB that `bucket_cap_mb="auto"` has chosen: for the first bucket, and for all other buckets.

        The sizes are the same on all ranks. To use them in a later run, pass this value as `bucket_cap_mb_list`.

        None: `bucket_cap_mb` is not "auto", or DDP has not chosen yet, or DDP cannot choose (for example, because a
        communication hook reduces the gradients).
        """
        caps = None if self._bucket_tuning is None else self._bucket_tuning.caps_bytes
        return None if caps is None else [cap / 2**20 for cap in caps]

    def _tune_buckets(self) -> None:
        if self._bucket_tuning is not None:
            self._tell_no_more(self._bucket_tuning.note_step)
            self._bucket_tuning = None
        if self._tunes_buckets:
            self._bucket_tuning = BucketTuning(self._group, self._reducer)
            self._tell(self._bucket_tuning.note_step)

    def _start_recording(self, settings: TraceSettings, *, only_first: bool = False) -> TraceRecording:
        parameters = [parameter for _, parameter in self._state.parameters()]
        recording = TraceRecording(settings, self._group, self._reducer, parameters, only_first=only_first)
        self._recordings.append(recording)
        self._tell(recording.note_step)
        return recording

    def _tell(self, listener: Listener) -> None:
        self._listeners.add(listener)
        self._reducer.on_iteration(self._listeners)

    def _tell_no_more(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        if not self._listeners:
            self._reducer.on_iteration(None)

    def _stop_counting_steps_together(self) -> None:
        # Each of these features needs the same step number on all ranks. From now on, the ranks' step numbers may differ.
        self._stop_watching_stragglers()
        self._stop_checking_replicas()
        if self._bucket_tuning is not None:
            self._bucket_tuning.give_up("ranks may have different numbers of steps")
        for recording in self._recordings:
            recording.ranks_may_differ = True

    def iteration_statistics(self) -> IterationStatistics:
        """Return when the parts of this rank's latest iteration began and ended, to see what communication costs.

        An iteration is a forward and the backward that averages its gradients. All times are in seconds.
        """
        return self._reducer.statistics

    def logging_data(self) -> dict[str, int | str]:
        """Return constructor arguments, sizes in bytes, and times in nanoseconds, under the keys of torch's DDP.

        If the backend tells which algorithm reduced each bucket, the key `bucket_algorithms` has these algorithms. torch's DDP
        has no such key.

        A time whose key begins with "avg" is a mean over sampled iterations: the first ten, then one in a hundred.
        `_set_ddp_runtime_logging_sample_rate` changes this rate. All other times are those of the latest iteration.
        """
        parameters = [parameter for _, parameter in self._state.parameters() if parameter.requires_grad]
        return {
            **logging_data.describe_module(self.module, parameters, self._group, self.process_group),
            **logging_data.describe_environment(),
            "device_ids": ", ".join(str(index) for index in self.device_ids or ()),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            **logging_data.describe_hook(self._reducer.hook[0], self._builtin_hook),
            "join_uneven_inputs": int(self._join is not None),
            **logging_data.describe_error(self._reducer),
            **logging_data.describe_buckets(self._reducer),
            **self._runtime.describe(),
            **logging_data.describe_algorithms(self._reducer, self._group),
            **logging_data.describe_iteration(self._reducer.statistics),
        }

    def _make_reducer(self, group: ProcessGroup, unreduced: Collection[str] = ()) -> Reducer:
        self._forget_new_parameters()
        parameters = [(name, parameter) for name, parameter in self._state.parameters() if parameter.requires_grad]
        # If all parameters are frozen for now, give the reducer all of them, because a reducer needs parameters. When some are
        # thawed, the next forward gives the reducer these parameters; see `_follow_module`.
        if not parameters:
            parameters = [(name, p) for name, p in self._state.parameters() if p.is_floating_point() or p.is_complex()]
        sparse = self._state.sparse_parameters()
        if self._tunes_buckets:
            check_can_tune(self.device, self.find_unused_parameters and not self.static_graph, bool(sparse))
            self._bucket_caps_bytes = measuring_caps(sum(parameter.nbytes for _, parameter in parameters))
        # Unfreeze frozen parameters only for this constructor, which registers hooks.
        with hookable(*(parameter for _, parameter in parameters)):
            reducer = Reducer(
                parameters,
                group,
                bucket_cap_bytes=self._bucket_caps_bytes,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                sparse=[id(parameter) in sparse for _, parameter in parameters],
                find_unused_parameters=self.find_unused_parameters,
                skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
                static_graph=self.static_graph,
                unreduced=unreduced,
                **self._delayed_among(parameters),
            )
        self._watch = ModelWatch(self._state, self, allows_unused=self.find_unused_parameters and not self.static_graph)
        # Perhaps this code runs within `no_sync`.
        reducer.keep_local(not self._requires_grad_sync)
        reducer.on_delivery(self._average_hooks)
        reducer.on_iteration(self._listeners if self._listeners else None)
        if self._wire_dtype is not None:
            reducer.set_hook(average_in, self._wire_dtype)
        return reducer

    def _delayed_among(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> dict[str, Any]:
        """Return the reducer's arguments for those delayed parameters that are neither frozen nor taken out of the module."""
        names = {name for name, _ in parameters}
        delayed = [name for name in self._delayed if name in names]
        return {"delayed": delayed, "delayed_until": self._delayed_until if delayed and self._delayed_until in names else None}

    def _verify_options(
        self,
        sync_buffers_at_first: bool,
        traced: TraceSettings | None,
        stragglers_every: int | None,
        check_every: int | None,
    ) -> None:
        """A collective. Check that all ranks have the same options."""
        sparse = self._state.sparse_parameters()
        options = {
            "bucket_cap_mb, bucket_cap_mb_list (in bytes)": "auto" if self._tunes_buckets else self._bucket_caps_bytes,
            "broadcast_buffers (at construction)": sync_buffers_at_first,
            "forward_sync_buffers": self.forward_sync_buffers,
            "find_unused_parameters": self.find_unused_parameters,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "static_graph": self.static_graph,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "mixed_precision": None if self.mixed_precision is None else str(self.mixed_precision),
            "delay_all_reduce_named_params": self._delayed,
            "param_to_hook_all_reduce": self._delayed_until,
            "SYNCLINE_TRACE, SYNCLINE_TRACE_STEPS": None if traced is None else f"{traced.first}-{traced.last}",
            "SYNCLINE_STRAGGLERS": stragglers_every,
            CHECK_EVERY: check_every,
            "sparse=True (in embeddings)": [name for name, parameter in self._state.parameters() if id(parameter) in sparse],
        }
        verify_same_options(options, group=self._group)

    # ---- mixed precision ----

    @property
    def _wire_dtype(self) -> torch.dtype | None:
        return None if self.mixed_precision is None else self.mixed_precision.wire_dtype

    def _check_no_wire_dtype(self) -> None:
        if self._wire_dtype is not None:
            raise MisuseError(
                f"mixed_precision averages gradients in {self._wire_dtype}, so it allows no communication hook: use only one "
                "of the two, such as torch.autocast with a hook that casts"
            )

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy keeps. A copy has no hooks.

        If a copy is made within `no_sync`, its backwards still average gradients.
        """
        if not self._is_default_group:
            raise MisuseError(
                f"a DistributedDataParallel on {self._group.place()} cannot be copied or pickled: only the default "
                "group is found again. Copy or save ddp.module (or its state_dict), and wrap it anew"
            )
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which averages gradients over the default group of this process. This is not a collective."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self.process_group = choose_default_group()
        self._group = as_ours(self.process_group)
        self._state.check(self._group, buffers=self.forward_sync_buffers)
        self._listeners, self._recordings, self._straggler_watch = IterationListeners(), [], None
        self._replica_check, self._average_hooks = None, AverageHooks(self.fused_optimizer)
        self._bucket_tuning = self._builtin_hook = None
        self._reducer = self._make_reducer(self._group)
        self._tune_buckets()
