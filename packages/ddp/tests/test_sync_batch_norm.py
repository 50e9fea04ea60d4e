"""SyncBatchNorm against torch's batch normalisation of the concatenated batch."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import DisagreementError, GroupClosedError, InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.internal import observe_calls
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel, SyncBatchNorm, convert_sync_batchnorm
from syncline.ddp.dedicated_group import dedicated_group

pytestmark = pytest.mark.ranks

CHANNELS = 3
# By name: the dimensions after the channels, and torch's layer for them.
SHAPES: dict[str, tuple[tuple[int, ...], type[torch.nn.modules.batchnorm._BatchNorm]]] = {
    "vectors": ((), torch.nn.BatchNorm1d),
    "1d": ((5,), torch.nn.BatchNorm1d),
    "2d": ((4, 2), torch.nn.BatchNorm2d),
    "3d": ((2, 3, 2), torch.nn.BatchNorm3d),
}
# How many rows each rank has, by name.
ROWS = {"even": (4, 4), "uneven": (1, 5, 2), "one is empty": (3, 0, 4), "one row each": (1, 1), "four ranks": (2, 1, 0, 3)}


def make_batches(rows: Sequence[int], rest: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Each channel has a mean and deviation of its own, each rank too."""
    generator = torch.Generator().manual_seed(3)
    shape = (1, CHANNELS, *[1] * len(rest))
    scale, offset = torch.tensor([1.0, 5.0, 0.2]).view(shape), torch.tensor([0.0, -7.0, 30.0]).view(shape)
    return [
        (torch.randn(n, CHANNELS, *rest, generator=generator, dtype=torch.float64) * scale + offset + rank).to(dtype)
        for rank, n in enumerate(rows)
    ]


def make_layer(kind: type[torch.nn.modules.batchnorm._BatchNorm], **options: Any) -> torch.nn.modules.batchnorm._BatchNorm:
    layer = kind(CHANNELS, **options).double()
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.arange(CHANNELS) + 0.5 - number)
    return layer


def cotangent(outputs: torch.Tensor, first_row: int) -> torch.Tensor:
    """The gradient of the loss that is written down here: other in each row and element."""
    rows = torch.arange(first_row, first_row + outputs.shape[0], dtype=outputs.dtype)
    within = torch.arange(outputs[:1].numel() or 1, dtype=outputs.dtype)
    return (0.3 * rows.view(-1, 1) + within.remainder(5)).sin().view(outputs.shape)


def run(layer: torch.nn.Module, inputs: torch.Tensor, first_row: int = 0) -> dict[str, Any]:
    """Two forwards and backwards: outputs and gradients of the second, and the state after it."""
    for _ in range(2):
        layer.zero_grad()
        leaf = inputs.clone(memory_format=torch.preserve_format).requires_grad_()
        outputs = layer(leaf)
        outputs.backward(cotangent(outputs, first_row))
    return {
        "outputs": outputs.detach(),
        "inputs.grad": leaf.grad,
        "parameter gradients": [p.grad for p in layer.parameters()],
        "buffers": [buffer.clone() for buffer in layer.buffers()],
    }


def run_on_ranks(layer: torch.nn.Module, batches: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    layers = [copy.deepcopy(layer) for _ in batches]
    starts = [sum(batch.shape[0] for batch in batches[:rank]) for rank in range(len(batches))]

    def body(group: ProcessGroup) -> dict[str, Any]:
        mine = convert_sync_batchnorm(layers[group.rank], group)
        assert isinstance(mine, SyncBatchNorm)
        return run(mine, batches[group.rank], starts[group.rank])

    return run_ranks(len(batches), body)


def assert_equals_the_whole(
    found: Sequence[dict[str, Any]], whole: dict[str, Any], *, rtol: float = 1e-10, atol: float = 1e-10
) -> None:
    def assert_close(mine: Any, expected: Any) -> None:
        torch.testing.assert_close(mine, expected, rtol=rtol, atol=atol)

    for key in ("outputs", "inputs.grad"):
        assert_close(torch.cat([rank[key] for rank in found]), whole[key])
    for index, gradient in enumerate(whole["parameter gradients"]):
        assert_close(torch.stack([rank["parameter gradients"][index] for rank in found]).sum(0), gradient)
    for rank in found:
        assert_close(rank["buffers"], whole["buffers"])
        assert all(torch.equal(a, b) for a, b in zip(rank["buffers"], found[0]["buffers"], strict=True))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_batch_normalisation_of_the_whole_batch(shape: str, rows: tuple[int, ...]) -> None:
    rest, kind = SHAPES[shape]
    layer, batches = make_layer(kind), make_batches(rows, rest)
    assert_equals_the_whole(run_on_ranks(layer, batches), run(copy.deepcopy(layer), torch.cat(batches)))


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_in_torch(options: dict[str, Any]) -> None:
    rest, kind = SHAPES["2d"]
    if not options.keys() <= inspect.signature(kind).parameters.keys():
        pytest.skip("this torch's batch normalisation has no such option")
    layer, batches = make_layer(kind, **options), make_batches((2, 3), rest)
    assert_equals_the_whole(run_on_ranks(layer, batches), run(copy.deepcopy(layer), torch.cat(batches)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("missing", [["num_batches_tracked"], ["running_mean", "running_var"]], ids=str)
def test_buffers_may_be_none_as_in_torch(missing: list[str], momentum: float | None) -> None:
    layer, batches = make_layer(torch.nn.BatchNorm1d, momentum=momentum), make_batches((2, 3), (5,))
    for name in missing:
        setattr(layer, name, None)
    assert_equals_the_whole(run_on_ranks(layer, batches), run(copy.deepcopy(layer), torch.cat(batches)))


@pytest.mark.parametrize(
    ("inputs", "parameters", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-4),
        (torch.float16, torch.float32, 1e-2),
        (torch.bfloat16, torch.float32, 8e-2),
        (torch.float16, torch.float16, 1e-2),
        (torch.bfloat16, torch.bfloat16, 8e-2),
    ],
    ids=str,
)
def test_dtypes(inputs: torch.dtype, parameters: torch.dtype, tolerance: float) -> None:
    """Halves are added up in float32: the only roundings are those of inputs, outputs and gradients."""
    rest, kind = SHAPES["2d"]
    layer, batches = make_layer(kind).to(parameters), make_batches((3, 2), rest, inputs)
    found = run_on_ranks(layer, batches)
    assert {rank[key].dtype for rank in found for key in ("outputs", "inputs.grad")} == {inputs}
    assert {gradient.dtype for rank in found for gradient in rank["parameter gradients"]} == {parameters}

    # The whole batch in float64, after the same rounding of inputs and parameters.
    exact = run(copy.deepcopy(layer).double(), torch.cat(batches).double())
    for key in ("outputs", "inputs.grad"):
        torch.testing.assert_close(
            torch.cat([rank[key] for rank in found]).double(), exact[key], rtol=tolerance, atol=tolerance
        )
    if parameters is torch.float32:
        assert_equals_the_whole(
            [{**rank, **{key: rank[key].double() for key in ("outputs", "inputs.grad")}} for rank in found],
            {**exact, "parameter gradients": [g.float() for g in exact["parameter gradients"]], "buffers": to_float(exact)},
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("rows", [(5,), (3, 2)], ids=str)
@pytest.mark.parametrize(
    ("inputs", "parameters", "estimates"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float64, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_parameters_and_estimates_of_other_dtypes(
    inputs: torch.dtype, parameters: torch.dtype, estimates: torch.dtype, rows: tuple[int, ...]
) -> None:
    """`mixed_precision` gives parameters and buffers such dtypes, in training and in evaluation, on any number of ranks."""
    layer, batches = make_layer(torch.nn.BatchNorm1d), make_batches(rows, (5,), inputs)
    exact = copy.deepcopy(layer)
    expected = exact(torch.cat(batches).double()), exact.eval()(torch.cat(batches).double())
    layer = layer.to(parameters)
    for name in ("running_mean", "running_var"):
        setattr(layer, name, getattr(layer, name).to(estimates))

    def body(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = convert_sync_batchnorm(copy.deepcopy(layer), group)
        trained = mine(batches[group.rank])
        evaluated = mine.eval()(batches[group.rank])
        assert {trained.dtype, evaluated.dtype} == {inputs}
        assert mine.running_var.dtype is estimates
        return trained.detach().double(), evaluated.detach().double(), mine.running_var.double()  # type: ignore[operator]

    found = run_ranks(len(rows), body)
    for number, whole in enumerate(expected):
        torch.testing.assert_close(torch.cat([rank[number] for rank in found]), whole.detach(), rtol=3e-2, atol=0.2)
    for rank in found:
        torch.testing.assert_close(rank[2], exact.running_var, rtol=1e-2, atol=1e-2)


def test_an_empty_batch_on_one_rank_leaves_the_estimates() -> None:
    layer = convert_sync_batchnorm(make_layer(torch.nn.BatchNorm1d).bfloat16())
    layer.running_var = torch.full((CHANNELS,), 3.0)
    assert layer(torch.empty(0, CHANNELS, dtype=torch.bfloat16)).shape == (0, CHANNELS)
    assert torch.equal(layer.running_var, torch.full((CHANNELS,), 3.0))
    assert layer.num_batches_tracked == 1  # as in torch's layer


def to_float(found: dict[str, Any]) -> list[torch.Tensor]:
    return [buffer.float() if buffer.is_floating_point() else buffer for buffer in found["buffers"]]


def test_a_mean_far_above_the_deviation_costs_no_precision() -> None:
    """E[x^2] - E[x]^2 in float32 would be off by 100 %."""
    layer = make_layer(torch.nn.BatchNorm1d, affine=False, momentum=1.0).float()
    batches = [(batch + 1e4).float() for batch in make_batches((64, 40, 3), (5,))]
    expected = torch.cat(batches).double().var((0, 2))
    for rank in run_on_ranks(layer, batches):
        torch.testing.assert_close(rank["buffers"][1].double(), expected, rtol=1e-4, atol=0.0)


def test_channels_last_stays_channels_last() -> None:
    layer = make_layer(torch.nn.BatchNorm2d)
    batches = [batch.to(memory_format=torch.channels_last) for batch in make_batches((2, 3), (4, 5))]
    found = run_on_ranks(layer, batches)
    assert_equals_the_whole(found, run(copy.deepcopy(layer), torch.cat(batches)))
    for rank in found:
        for key in ("outputs", "inputs.grad"):
            assert rank[key].is_contiguous(memory_format=torch.channels_last), key


def test_evaluation_uses_the_running_estimates_and_is_no_collective() -> None:
    layer = convert_sync_batchnorm(make_layer(torch.nn.BatchNorm1d))
    layer(torch.randn(6, CHANNELS, dtype=torch.float64))
    plain = make_layer(torch.nn.BatchNorm1d).eval()
    plain.load_state_dict(layer.state_dict())
    layers = [copy.deepcopy(layer).eval() for _ in range(2)]
    inputs = torch.randn(2, CHANNELS, dtype=torch.float64)

    def body(group: ProcessGroup) -> torch.Tensor | None:
        mine = convert_sync_batchnorm(layers[group.rank], group)
        return mine(inputs).detach() if group.rank == 0 else None  # type: ignore[no-any-return]

    found = run_ranks(2, body)[0]
    assert torch.equal(found, plain(inputs))


def test_one_collective_in_forward_and_one_in_backward() -> None:
    inputs = make_batches((2, 3), (4,))

    def body(group: ProcessGroup) -> list[str]:
        layer = SyncBatchNorm(CHANNELS, process_group=group).double()
        layer(inputs[group.rank])  # makes the dedicated group, compares the layers
        calls: list[str] = []
        dedicated = dedicated_group(group)
        stop = observe_calls(lambda call, _: calls.append(call.name) if call.group is dedicated else None)
        leaf = inputs[group.rank].requires_grad_()
        outputs = layer(leaf)
        calls.append("backward")
        outputs.sum().backward()
        layer(inputs[group.rank].detach()).sum().backward()  # no gradient wanted: nothing to agree on
        stop()
        return calls

    for calls in run_ranks(2, body):
        assert calls == ["all_gather_into_tensor", "backward", "all_reduce", "all_gather_into_tensor"]


def test_a_frozen_layer_and_no_grad() -> None:
    rest, kind = SHAPES["1d"]
    layer, batches = make_layer(kind), make_batches((2, 3), rest)
    layer.requires_grad_(False)
    assert layer.weight is not None
    layer.weight.requires_grad_()
    layers = [copy.deepcopy(layer) for _ in batches]

    def body(group: ProcessGroup) -> dict[str, Any]:
        mine = convert_sync_batchnorm(layers[group.rank], group)
        with torch.no_grad():
            mine(batches[group.rank])
        return run(mine, batches[group.rank], 2 * group.rank)

    local = copy.deepcopy(layer)
    local(torch.cat(batches))
    whole = run(local, torch.cat(batches))
    found = run_ranks(2, body)
    assert [gradient is None for gradient in whole["parameter gradients"]] == [False, True]
    for rank in [whole, *found]:
        assert rank["parameter gradients"].pop() is None
    assert_equals_the_whole(found, whole)


def test_a_shallow_copy_has_the_same_group_and_parameters() -> None:
    def body(group: ProcessGroup) -> None:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        copied = copy.copy(layer)
        assert copied.process_group is group
        assert copied.weight is layer.weight

    run_ranks(1, body)


# ---- refusals ----


def test_differentiating_twice_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        layer = SyncBatchNorm(CHANNELS, process_group=group).double()
        leaf = make_batches((2, 3), ())[group.rank].requires_grad_()
        (gradient,) = torch.autograd.grad(layer(leaf).square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize("rows", [(1, 0), (0, 0)])
def test_less_than_two_values_are_refused_on_every_rank(rows: tuple[int, int]) -> None:
    def body(group: ProcessGroup) -> None:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        count = sum(rows)
        with pytest.raises(
            InvalidArgumentError, match=f"more than 1 value per channel over all ranks when training, found {count}"
        ):
            layer(torch.ones(rows[group.rank], CHANNELS))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("channels", "dtypes", "complaint"),
    [
        ((3, 4, 3), (torch.float32,) * 3, "3 channels of torch.float32 on rank 0, 4 channels of torch.float32 on rank 1"),
        (
            (3, 3, 3),
            (torch.float32, torch.float32, torch.bfloat16),
            "3 channels of torch.float32 on rank 0, 3 channels of torch.bfloat16 on rank 2",
        ),
    ],
)
def test_ranks_with_other_layers_or_inputs_are_named(
    channels: tuple[int, ...], dtypes: tuple[torch.dtype, ...], complaint: str
) -> None:
    def body(group: ProcessGroup) -> None:
        layer = SyncBatchNorm(channels[group.rank], process_group=group)
        with pytest.raises(DisagreementError, match=complaint):
            layer(torch.ones(2, channels[group.rank], dtype=dtypes[group.rank]))

    run_ranks(3, body)


@pytest.mark.parametrize("training", [True, False])
def test_inputs_of_another_shape_are_refused(training: bool) -> None:
    layer = SyncBatchNorm(CHANNELS).train(training)
    for shape in ((5,), (2, 4, 4)):
        with pytest.raises(InvalidArgumentError, match=r"expected inputs of shape \(batch, 3, ...\)"):
            layer(torch.ones(shape))


# ---- the group ----


def test_without_a_group_it_is_plain_batch_normalisation() -> None:
    layer, batch = make_layer(torch.nn.BatchNorm1d), make_batches((4,), (2,))[0]
    converted = convert_sync_batchnorm(copy.deepcopy(layer))
    plain, ours = run(layer, batch), run(converted, batch)
    torch.testing.assert_close(ours, plain, rtol=0.0, atol=0.0)


def test_all_layers_of_a_group_share_one_lane() -> None:
    def body(group: ProcessGroup) -> None:
        dedicated = dedicated_group(group)
        assert dedicated is dedicated_group(group)
        assert dedicated is not group
        assert (dedicated.rank, dedicated.size) == (group.rank, group.size)

    run_ranks(3, body)


class Gated(torch.nn.Module):
    """The expert is defined last, so its bucket goes first; which is early on a rank that does not use it, late on others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 2)
        self.trunk = torch.nn.Linear(3, 4)
        self.expert = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, use: bool) -> torch.Tensor:
        hidden = self.trunk(inputs)
        return self.head(self.norm(hidden + self.expert(hidden) if use else hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize("world_size", [2, 3])
def test_unused_parameters_do_not_disturb_the_order(world_size: int) -> None:
    torch.manual_seed(0)
    plain = Gated().double()
    models = [copy.deepcopy(plain) for _ in range(world_size)]
    inputs = torch.randn(world_size, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def body(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(
            convert_sync_batchnorm(models[group.rank], group),
            process_group=group,
            bucket_cap_mb=1e-6,
            find_unused_parameters=True,
        )
        for step in range(3):
            model.zero_grad()
            model(inputs[group.rank], use=(group.rank + step) % world_size == 0).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}

    found = run_ranks(world_size, body)
    # The whole batch on one process: the expert sees the rows of the rank that used it in the last step.
    user = (-2) % world_size
    hidden = plain.trunk(inputs)
    used = torch.zeros(world_size, 1, 1, dtype=torch.float64)
    used[user] = 1.0
    hidden = hidden + used * plain.expert(hidden)
    plain.head(plain.norm(hidden.flatten(0, 1))).square().mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for rank in found:
        torch.testing.assert_close(rank, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_a_checkpoint_under_no_sync(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh()).double()
    models = [copy.deepcopy(block) for _ in range(2)]
    data = torch.randn(2, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        leaf = inputs.clone().requires_grad_()  # a re-entrant checkpoint needs it
        return checkpoint(model, leaf, use_reentrant=use_reentrant).square().mean()  # type: ignore[no-any-return]

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        model = DistributedDataParallel(convert_sync_batchnorm(models[group.rank], group), process_group=group)
        with model.no_sync():
            loss(model, data[0, group.rank]).backward()
        loss(model, data[1, group.rank]).backward()
        return [*(p.grad.clone() for p in model.parameters() if p.grad is not None), *(b.clone() for b in model.buffers())]

    for micro in data:
        loss(block, micro.flatten(0, 1)).backward()
    expected = [*(p.grad for p in block.parameters()), *block.buffers()]
    for rank in run_ranks(2, body):
        torch.testing.assert_close(rank, expected, rtol=1e-9, atol=1e-12)


# ---- conversion ----


class Residual(torch.nn.Module):
    """A layer that occurs under two names, and once more elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(2)
        self.again = self.norm
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(self.norm, torch.nn.SyncBatchNorm(5, momentum=None))])
        self.free = torch.nn.InstanceNorm2d(2)


def test_conversion_takes_over_everything() -> None:
    module = Residual().double().eval()
    norm = module.norm
    assert norm.weight is not None
    norm.weight.requires_grad_(False)
    norm.label = "mine"
    seen: list[str] = []
    norm.register_forward_hook(lambda *_: seen.append("hook"))
    names, tensors = list(module.state_dict()), list(module.state_dict(keep_vars=True).values())

    converted = SyncBatchNorm.convert_sync_batchnorm(module, "the group")  # type: ignore[arg-type]
    assert converted is module
    assert type(module.norm) is SyncBatchNorm
    assert module.norm is module.again is module.blocks[0][0]
    inner = module.blocks[0][1]
    assert type(inner) is SyncBatchNorm
    assert (inner.momentum, inner.num_features, inner.process_group) == (None, 5, "the group")
    assert type(module.free) is torch.nn.InstanceNorm2d
    assert list(module.state_dict()) == names
    assert all(a is b for a, b in zip(module.state_dict(keep_vars=True).values(), tensors, strict=True))
    assert not module.norm.weight.requires_grad
    assert not module.norm.training
    assert module.norm.label == "mine"
    module.norm(torch.ones(1, 2, 2, 2, dtype=torch.float64))
    assert seen == ["hook"]
    convert_sync_batchnorm(module)
    assert module.norm.process_group == "the group"


class Activated(torch.nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(input))


def parametrised() -> torch.nn.Module:
    layer = torch.nn.BatchNorm1d(3)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    return layer


@pytest.mark.parametrize(
    ("make_layer", "complaint"),
    [
        (lambda: Activated(3), "layer '1' \\(Activated\\): it has a forward of its own"),
        (torch.nn.LazyBatchNorm1d, "layer '1' \\(LazyBatchNorm1d\\): it is not initialised yet"),
        (parametrised, "it is parametrised"),
    ],
)
def test_what_conversion_would_lose_is_refused(make_layer: Any, complaint: str) -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), make_layer())
    with pytest.raises(MisuseError, match=complaint):
        convert_sync_batchnorm(module)
    assert type(module[0]) is torch.nn.BatchNorm1d


def test_copies_and_pickles() -> None:
    def body(group: ProcessGroup) -> None:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        copied = copy.deepcopy(torch.nn.Sequential(layer))[0]
        assert copied.process_group is group
        assert copied.weight is not layer.weight
        with pytest.raises(MisuseError, match="cannot be pickled"):
            pickle.dumps(layer)

    run_ranks(1, body)
    layer = pickle.loads(pickle.dumps(SyncBatchNorm(CHANNELS, momentum=None)))
    assert (layer.process_group, layer.momentum) == (None, None)


def test_layers_are_compared_anew_in_another_group() -> None:
    """A rank that comes later has a layer that was compared with nobody, and must find the others doing the same."""

    def body(group: ProcessGroup) -> None:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        layer(torch.randn(4, CHANNELS))
        later = group.split(0)
        assert later is not None
        layer.process_group = later
        (layer if group.rank == 0 else SyncBatchNorm(CHANNELS, process_group=later))(torch.randn(4, CHANNELS))

    run_ranks(2, body)


def test_a_dedicated_group_ends_with_its_group() -> None:
    def body(group: ProcessGroup) -> None:
        for end in ("close", "abort"):
            part = group.split(0)
            assert part is not None
            dedicated = dedicated_group(part)
            dedicated.barrier()
            group.barrier()
            getattr(part, end)()
            with pytest.raises(GroupClosedError):
                dedicated.barrier()

    run_ranks(2, body)
