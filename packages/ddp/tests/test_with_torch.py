"""What users combine DistributedDataParallel with in torch; the oracle is the same on one process with the whole batch."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from syncline.collectives import ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel, MixedPrecision
from test_support.training_runs import SHARE, loss_of, make_data

pytestmark = pytest.mark.ranks

SMALL_CAP_MB = 128 / 1024**2  # several buckets even for this model
# The ranks are threads here, and such a torch mixes up the records that it keeps of what each thread compiles.
COMPILES_ON_ONE_THREAD = "2.8" <= TorchVersion(torch.__version__) < "2.11"
Train = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], Any]


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 6), torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 3)

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(inputs))))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(inputs))  # type: ignore[no-any-return]


def skip_where_threads_cannot_compile(backend: str) -> None:
    if backend == "aot_eager" and COMPILES_ON_ONE_THREAD:
        pytest.skip("this torch compiles on one thread at a time")


def make_network() -> Network:
    torch.manual_seed(0)
    return Network().double()


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients and state, by the bare module's names."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {**state, **{f"{name}, gradient": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


def compare(
    train: Train,
    *,
    steps: int = 3,
    make: Callable[[], torch.nn.Module] = make_network,
    world_size: int = 2,
    tolerance: float = 1e-10,
    **options: Any,
) -> list[Any]:
    """Train on ranks and locally; what `train` returned on each rank, and locally last."""
    inputs, targets = make_data(steps, world_size * SHARE)
    modules = [make() for _ in range(world_size + 1)]

    def body(group: ProcessGroup) -> tuple[dict[str, torch.Tensor], Any]:
        rows = slice(group.rank * SHARE, (group.rank + 1) * SHARE)
        module = modules[group.rank]
        ddp = DistributedDataParallel(module, process_group=group, **{"bucket_cap_mb": SMALL_CAP_MB, **options})
        returned = train(ddp, inputs[:, rows], targets[:, rows])
        return state_of(module), returned

    found = run_ranks(world_size, body)
    before = state_of(modules[-1])
    locally = train(modules[-1], inputs, targets)
    expected = state_of(modules[-1])
    assert any("gradient" in name for name in expected)
    assert any(not torch.equal(before[name], expected[name]) for name in before)
    for state, _ in found:
        torch.testing.assert_close(state, expected, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(state[name], found[0][0][name]) for name in state)
    return [*(returned for _, returned in found), locally]


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_through(
    model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    optimizer = sgd(model)
    for rows, wanted in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        loss_of(forward, rows, wanted).backward()
        optimizer.step()


# ---- compilers ----


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Compiled code is kept by code object, and ranks as threads share it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def assert_whole_networks_were_compiled() -> None:
    """Ranks as threads may share a graph, but none of them breaks within the network, which has five operations."""
    operations = torch._dynamo.utils.counters["stats"]["calls_captured"]
    assert operations > 0
    assert operations % 5 == 0


@pytest.mark.parametrize(
    ("backend", "options"),
    [("eager", {}), ("aot_eager", {}), ("aot_eager", {"gradient_as_bucket_view": True, "find_unused_parameters": True})],
    ids=str,
)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiling_the_wrapper(backend: str, options: dict[str, Any]) -> None:
    skip_where_threads_cannot_compile(backend)

    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        step_through(model, inputs, targets, torch.compile(model, backend=backend))  # type: ignore[arg-type]

    compare(train, **options)
    assert_whole_networks_were_compiled()


@pytest.mark.parametrize("options", [{}, {"mixed_precision": MixedPrecision(torch.bfloat16)}], ids=["plain", "mixed precision"])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler itself looks at that of the wrapper's outputs
@pytest.mark.usefixtures("fresh_compiler")
def test_compiling_what_calls_the_wrapper(options: dict[str, Any]) -> None:
    """It is not looked into; warnings are errors here."""

    def step(group: ProcessGroup) -> torch.Tensor:
        model = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group, **options)
        compiled = torch.compile(lambda inputs: model(inputs.cos()).sin(), backend="eager")
        inputs = torch.ones(1, 3)
        assert torch.equal(compiled(inputs), model(inputs.cos()).sin())
        compiled(inputs).sum().backward()
        return model.module.weight.grad  # type: ignore[return-value]

    first, second = run_ranks(2, step)
    assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler itself looks at that of each cast
@pytest.mark.usefixtures("fresh_compiler")
def test_with_mixed_precision_a_compiler_gets_only_the_module() -> None:
    """It compiled the cast of each parameter, until it warned that it had compiled one function too often."""

    def step(group: ProcessGroup) -> None:
        precision = MixedPrecision(torch.float32)
        model = DistributedDataParallel(make_network(), process_group=group, mixed_precision=precision)
        torch.compile(model, backend="eager")(make_data(1, 2)[0][0]).sum().backward()

    run_ranks(1, step)
    assert_whole_networks_were_compiled()


def test_a_forward_and_backward_load_no_compiler() -> None:
    """Optimizers of torch's do."""
    program = """
import sys, torch
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel

def step(group):
    model = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    model(torch.ones(1, 3)).sum().backward()

run_ranks(1, step)
print("loaded" if "torch._dynamo" in sys.modules else "not loaded")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "not loaded"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.usefixtures("fresh_compiler")
def test_wrapping_what_was_compiled(backend: str) -> None:
    skip_where_threads_cannot_compile(backend)

    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        step_through(model, inputs, targets, model)

    def make() -> torch.nn.Module:
        module = make_network()
        module.compile(backend=backend)
        return module

    compare(train, make=make)
    assert_whole_networks_were_compiled()


# ---- checkpoints ----


class Checkpointed(Network):
    use_reentrant = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.hidden, inputs.clone().requires_grad_(), use_reentrant=self.use_reentrant))  # type: ignore[no-any-return]


class CheckpointedReentrantly(Checkpointed):
    use_reentrant = True


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Checkpointed, {}),
        (Checkpointed, {"find_unused_parameters": True}),
        (Checkpointed, {"static_graph": True}),
        (CheckpointedReentrantly, {}),
        (CheckpointedReentrantly, {"static_graph": True, "gradient_as_bucket_view": True}),
    ],
)
def test_checkpoints(kind: type[Network], options: dict[str, Any]) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return kind().double()

    compare(lambda model, inputs, targets: step_through(model, inputs, targets, model), make=make, **options)


# ---- precision ----


def test_autocast() -> None:
    """bfloat16 has 8 bits, so gradients agree to 1 % of their largest value or so; master weights stay in float32."""

    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> set[torch.dtype]:
        seen = set()
        optimizer = sgd(model)
        for rows, wanted in zip(inputs.float(), targets.float(), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(rows)
                seen.add(outputs.dtype)
            torch.nn.functional.mse_loss(outputs.float(), wanted).backward()
            optimizer.step()
        return seen

    def make() -> torch.nn.Module:
        return make_network().float()

    assert compare(train, make=make, tolerance=2e-2) == [{torch.bfloat16}] * 3


def test_gradient_scaler() -> None:
    """The ranks agree on skipped steps: what overflows on rank 0 in the third one is infinite on all after the reduction."""

    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
        optimizer, scaler, scales = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
        for number, (rows, wanted) in enumerate(zip(inputs, targets, strict=True)):
            optimizer.zero_grad()
            overflows = number == 2 and bool(rows[0, 0] == inputs_of_rank_0)
            loss = loss_of(model, rows, wanted) * (float("inf") if overflows else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizer.zero_grad()
        loss_of(model, inputs[0], targets[0]).backward()
        return scales

    inputs_of_rank_0 = make_data(5, 2 * SHARE)[0][2, 0, 0]
    found = compare(train, steps=5)
    assert found == [[8.0, 16.0, 8.0, 8.0, 16.0]] * 3


# ---- ways to call ----


def test_functional_call() -> None:
    """Parameters that are passed in get no gradient from the reducer; those of the module are reduced as ever."""

    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        named = dict(model.named_parameters())
        replaced = {name: (2 * parameter).detach() for name, parameter in named.items() if "first" in name}
        with torch.no_grad():
            doubled = torch.func.functional_call(model, replaced, (inputs[0],))
        step_through(model, inputs, targets, lambda rows: torch.func.functional_call(model, named, (rows,)))
        return doubled

    *by_rank, locally = compare(train)
    torch.testing.assert_close(torch.cat(by_rank), locally)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(context: Callable[[], AbstractContextManager[None]]) -> None:
    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer, outputs = sgd(model), []
        for rows, wanted in zip(inputs, targets, strict=True):
            model.eval()
            with context():
                outputs.append(model(rows))
            model.train()
            optimizer.zero_grad()
            loss_of(model, rows, wanted).backward()
            optimizer.step()
            with context():
                outputs.append(model(rows))
        return torch.stack(outputs)

    *by_rank, locally = compare(train, steps=4)
    torch.testing.assert_close(torch.cat(by_rank, 1), locally)


def test_several_forwards_before_a_backward() -> None:
    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            losses = [loss_of(model, rows, wanted) for rows, wanted in zip(inputs, targets, strict=True)]
            torch.stack(losses).sum().backward()
            optimizer.step()

    compare(train)


def test_lbfgs_closures() -> None:
    """The optimizer decides how often to evaluate, by losses and gradients: so the closure's loss must be the ranks' mean."""

    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn=None)
        evaluations = 0

        def closure() -> float:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            loss = loss_of(model, inputs[0], targets[0])
            loss.backward()
            if isinstance(model, DistributedDataParallel):
                loss = loss.detach().clone()
                model.process_group.all_reduce(loss).wait()
                loss /= model.process_group.size
            return loss.item()

        for _ in range(2):
            optimizer.step(closure)
        return evaluations

    evaluations = compare(train, tolerance=1e-6)
    assert len(set(evaluations)) == 1
    assert evaluations[0] > 4


@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("as_view", [False, True])
def test_gradient_clipping(clip: str, as_view: bool) -> None:
    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
        optimizer, norms = sgd(model), []
        for rows, wanted in zip(inputs, targets, strict=True):
            optimizer.zero_grad()
            loss_of(model, rows, wanted).backward()
            if clip == "norm":
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            else:
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
        return norms

    norms = compare(train, gradient_as_bucket_view=as_view)
    assert norms == [pytest.approx(norms[0])] * 3
    assert all(norm > 0.1 for norm in norms[0])


# ---- parts of torch that change modules ----


def test_parametrised_weights() -> None:
    def make() -> torch.nn.Module:
        network = make_network()
        torch.nn.utils.parametrizations.weight_norm(network.first)
        torch.nn.utils.parametrizations.orthogonal(network.second)
        return network

    compare(lambda model, inputs, targets: step_through(model, inputs, targets, model), make=make, tolerance=1e-8)


def test_averaged_model() -> None:
    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        averaged = torch.optim.swa_utils.AveragedModel(bare)
        optimizer = sgd(model)
        for rows, wanted in zip(inputs, targets, strict=True):
            optimizer.zero_grad()
            loss_of(model, rows, wanted).backward()
            optimizer.step()
            averaged.update_parameters(bare)
        return [parameter.detach() for parameter in averaged.parameters()]

    *by_rank, locally = compare(train, steps=4)
    for found in by_rank:
        torch.testing.assert_close(found, locally)
        assert all(torch.equal(a, b) for a, b in zip(found, by_rank[0], strict=True))


def test_gradient_accumulation_with_hooks_on_gradients() -> None:
    """A user's own hooks run before the reduction, on what this rank has computed."""

    def make() -> torch.nn.Module:
        network = make_network()
        network.first.weight.register_hook(lambda gradient: 3 * gradient)
        return network

    def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer = sgd(model)
        for number, (rows, wanted) in enumerate(zip(inputs, targets, strict=True)):
            is_last = number % 2 == 1
            wait = isinstance(model, DistributedDataParallel) and not is_last
            with model.no_sync() if wait else nullcontext():  # type: ignore[operator]
                loss_of(model, rows, wanted).backward()
            if is_last:
                optimizer.step()
                if number < 3:
                    optimizer.zero_grad()

    compare(train, steps=4, make=make)


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs.flatten(0, 1), targets.flatten(0, 1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def test_loaders_and_samplers() -> None:
    """torch's DistributedSampler takes rank and number of ranks from whoever knows them."""
    inputs, targets = make_data(3, 2 * SHARE)
    models = [make_network() for _ in range(3)]
    rows = Rows(inputs, targets)

    def batches(rank: int, size: int) -> Any:
        sampler = torch.utils.data.DistributedSampler(rows, num_replicas=size, rank=rank, shuffle=False)
        return torch.utils.data.DataLoader(rows, batch_size=2 * SHARE // size, sampler=sampler)

    def body(group: ProcessGroup) -> dict[str, torch.Tensor]:
        ddp = DistributedDataParallel(models[group.rank], process_group=group)
        optimizer = sgd(ddp)
        for part, wanted in batches(group.rank, group.size):
            optimizer.zero_grad()
            loss_of(ddp, part, wanted).backward()
            optimizer.step()
        return state_of(models[group.rank])

    local, optimizer = models[2], sgd(models[2])
    for part, wanted in batches(0, 1):
        optimizer.zero_grad()
        loss_of(local, part, wanted).backward()
        optimizer.step()
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, state_of(local))


def test_a_model_that_was_trained_goes_on_locally() -> None:
    """Hooks of a wrapper that is gone do not disturb the bare module."""
    module = make_network()
    inputs, targets = make_data(1, SHARE)

    def body(group: ProcessGroup) -> None:
        loss_of(DistributedDataParallel(module, process_group=group), inputs[0], targets[0]).backward()

    run_ranks(1, body)
    twin = copy.deepcopy(module)
    for model in (module, twin):
        model.zero_grad()
        loss_of(model, inputs[0], targets[0]).backward()
    torch.testing.assert_close(state_of(module), state_of(twin))
