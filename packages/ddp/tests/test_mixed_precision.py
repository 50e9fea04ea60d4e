"""Mixed precision: against native DDP where that works on the CPU, else against a low-precision copy on each rank."""

from __future__ import annotations

import copy
import inspect
import json
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup, destroy_process_group, init_process_group
from syncline.collectives.testing import run_ranks
from syncline.collectives.testing.processes import run_processes
from syncline.ddp import DistributedDataParallel, MixedPrecision, low_precision
from syncline.ddp.mixed_precision import average_in
from syncline.reducer import GradBucket
from test_support.full_run import cases
from test_support.jobs import LIMIT_S
from test_support.preloaded import OPTIMIZERS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
JOB = Path(__file__).with_name("mixed_precision_job.py")
# Halves have 8 bits, and a sum of three is rounded here after, natively before the division.
EPSILON = 2.0**-7


def native_needs_a_gpu() -> bool:
    """torch's own asks for a stream; where that must be one of CUDA (torch 2.6), it works on no CPU."""
    is_any = "torch.Stream()" in inspect.getsource(torch.nn.parallel.DistributedDataParallel)
    try:
        (torch.Stream if is_any else torch.cuda.Stream)()
    except RuntimeError:
        return True
    return False


@pytest.mark.launch
@pytest.mark.skipif(native_needs_a_gpu(), reason="torch's own mixed precision needs a GPU in this build of torch")
@pytest.mark.parametrize("world_size", cases([2], in_full=[3]))
def test_equals_native_ddp(world_size: int, tmp_path: Path) -> None:
    run_processes(JOB, world_size, tmp_path, timeout_s=LIMIT_S, preload=OPTIMIZERS)
    for rank in range(world_size):
        found = json.loads((tmp_path / f"compared-{rank}.json").read_text())
        assert set(found) >= {"all in bfloat16", "parameters only", "reduced in full", "ignoring"}
        for case, compared in found.items():
            assert compared["steps"] == 4
            assert compared["gradients"] >= 16
            is_exact = world_size == 2 or case == "reduced in full"
            assert compared["difference"] <= (0.0 if is_exact else 2 * EPSILON), case


# ---- against a low-precision copy on each rank ----


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        return self.head(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


class Tied(Plain):
    """The embedding's weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 8)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        return self.head(torch.tanh(self.first(inputs) + self.embedding(torch.arange(len(inputs)) % 3)))  # type: ignore[no-any-return]


class Experts(Plain):
    """One of three experts for each call; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        return self.head(self.experts[call % 3](torch.tanh(self.first(inputs))))  # type: ignore[no-any-return]


class Recurrent(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.LSTM(4, 8, num_layers=2, batch_first=True)  # type: ignore[assignment]

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        return self.head(self.first(inputs.view(2, -1, 4))[0].flatten(0, 1))  # type: ignore[no-any-return]


class Checkpointed(Plain):
    """Backward runs a function of the module's own, which uses parameters without a submodule's forward."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def _block(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.scale.dtype is inputs.dtype
        return torch.tanh(torch.nn.functional.linear(inputs, self.first.weight, self.first.bias)) * self.scale

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        return self.head(checkpoint(self._block, inputs, use_reentrant=self.use_reentrant))  # type: ignore[no-any-return]


class CheckpointedReentrantly(Checkpointed):
    use_reentrant = True


class Case(NamedTuple):
    model: Callable[[], torch.nn.Module]
    options: Mapping[str, Any] = MappingProxyType({})
    micro_batches: int = 1


CASES = {
    "plain": Case(Plain),
    "as view": Case(Plain, {"gradient_as_bucket_view": True}),
    "accumulated": Case(Plain, micro_batches=3),
    "tied": Case(Tied),
    "experts": Case(Experts, {"find_unused_parameters": True}),
    "experts, accumulated": Case(Experts, {"find_unused_parameters": True, "gradient_as_bucket_view": True}, 2),
    "recurrent": Case(Recurrent),
    "checkpointed": Case(Checkpointed),
    "checkpointed reentrantly": Case(CheckpointedReentrantly, {"static_graph": True}),
}
STEPS = 3
Gradients = dict[str, "torch.Tensor | None"]


def inputs_of(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    return torch.randn(6, 4, generator=generator).requires_grad_()


def gradients(model: torch.nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def expected_gradients(model: torch.nn.Module, case: Case, step: int, world_size: int, wire: torch.dtype) -> Gradients:
    """Each rank's: computed in bfloat16, added up in float32, rounded to what travels; their mean, rounded again."""
    by_rank = []
    for rank in range(world_size):
        total: Gradients = {name: None for name, _ in model.named_parameters()}
        for micro in range(case.micro_batches):
            low = copy.deepcopy(model).bfloat16()
            low(inputs_of(rank, step, micro).bfloat16(), call=rank + step + micro).float().square().mean().backward()
            for name, gradient in gradients(low).items():
                if gradient is not None:
                    before = total[name]
                    total[name] = gradient.float() if before is None else before + gradient.float()
        by_rank.append(total)
    means: Gradients = {}
    for name in by_rank[0]:
        found = [total[name] for total in by_rank]
        terms = [torch.zeros(()) if term is None else term.to(wire).float() for term in found]
        mean = sum(terms[1:], terms[0]) / world_size
        means[name] = None if all(term is None for term in found) else mean.to(wire).float()
    return means


@pytest.mark.ranks
@pytest.mark.parametrize("wire", [BF16, FP32], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_low_precision_copies(name: str, world_size: int, wire: torch.dtype) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    models = [copy.deepcopy(model) for _ in range(world_size)]
    config = MixedPrecision(param_dtype=BF16, reduce_dtype=None if wire is BF16 else wire)

    def body(group: ProcessGroup) -> list[Gradients]:
        ddp = DistributedDataParallel(
            models[group.rank], process_group=group, mixed_precision=config, bucket_cap_mb=1e-4, **case.options
        )
        found = []
        for step in range(STEPS):
            ddp.zero_grad()
            for micro in range(case.micro_batches):
                with nullcontext() if micro == case.micro_batches - 1 else ddp.no_sync():
                    outputs = ddp(inputs_of(group.rank, step, micro), call=group.rank + step + micro)
                    assert outputs.dtype is BF16
                    outputs.float().square().mean().backward()
            found.append(gradients(ddp.module))
        return found

    by_rank = run_ranks(world_size, body)
    for step in range(STEPS):
        expected = expected_gradients(model, case, step, world_size, wire)
        assert any(gradient is None for gradient in expected.values()) == ("experts" in name)
        for rank in by_rank:
            # What travels is rounded once before and once after; a sum in another order may cross one rounding.
            torch.testing.assert_close(rank[step], expected, rtol=EPSILON if wire is BF16 else 1e-6, atol=1e-6)
            assert all(torch.equal(a, b) for a, b in zip(*map(present, (rank[step], by_rank[0][step])), strict=True))


def present(found: Gradients) -> list[torch.Tensor]:
    return [gradient for gradient in found.values() if gradient is not None]


# ---- outside the module's own computations, parameters are parameters ----


def with_ddp(body: Callable[[DistributedDataParallel], None], module: torch.nn.Module, **options: Any) -> None:
    def run(group: ProcessGroup) -> None:
        body(DistributedDataParallel(module, process_group=group, **{"mixed_precision": MixedPrecision(BF16), **options}))

    run_ranks(1, run)


@pytest.mark.ranks
def test_parameters_are_themselves_between_forward_and_backward() -> None:
    def body(ddp: DistributedDataParallel) -> None:
        before = dict(ddp.named_parameters())
        outputs = ddp(inputs_of(0, 0, 0), call=0)
        assert all(dict(ddp.named_parameters())[name] is parameter for name, parameter in before.items())
        ddp.zero_grad()
        outputs.sum().backward()
        assert all(dict(ddp.named_parameters())[name] is parameter for name, parameter in before.items())
        assert {p.grad.dtype for p in ddp.parameters() if p.grad is not None} == {FP32}
        copy.deepcopy(ddp.module)

    with_ddp(body, Recurrent())


@pytest.mark.ranks
def test_evaluation_computes_in_low_precision_too() -> None:
    module = Plain()

    def body(ddp: DistributedDataParallel) -> None:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                outputs = ddp(inputs_of(0, 0, 0), call=0)
            assert torch.equal(outputs, copy.deepcopy(module).bfloat16()(inputs_of(0, 0, 0).bfloat16(), call=0))
            assert {p.dtype for p in ddp.parameters()} == {FP32}

    with_ddp(body, module)


class Failing(Plain):
    """Fails in forward at call 1, and in the backward of call 2."""

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if call == 1:
            raise RuntimeError("forward fails")
        if call == 2:
            hidden.register_hook(fail)
        return self.head(hidden)  # type: ignore[no-any-return]


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("backward fails")


@pytest.mark.ranks
def test_failures_leave_the_parameters_in_place() -> None:
    def body(ddp: DistributedDataParallel) -> None:
        before = list(ddp.parameters())
        with pytest.raises(RuntimeError, match="forward fails"):
            ddp(inputs_of(0, 0, 0), call=1)
        assert all(a is b for a, b in zip(ddp.parameters(), before, strict=True))
        with ddp.no_sync(), pytest.raises(RuntimeError, match="backward fails"):
            ddp(inputs_of(0, 0, 0), call=2).sum().backward()
        assert all(a is b for a, b in zip(ddp.parameters(), before, strict=True))
        ddp.zero_grad()
        ddp(inputs_of(0, 0, 0), call=0).sum().backward()
        assert all(p.grad is not None for p in ddp.parameters())

    with_ddp(body, Failing())


class Buffered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor([1.0, 1 / 3, 0.2]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        assert isinstance(self.calls, torch.Tensor)
        self.calls += 1
        return {"nested": [self.layer(inputs) * self.scale, self.calls]}


@pytest.mark.ranks
def test_buffers_are_converted_for_good_unless_ignored_or_counts() -> None:
    def body(ddp: DistributedDataParallel) -> None:
        found = {name: buffer.dtype for name, buffer in ddp.module.named_buffers()}
        assert found == {"scale": FP16, "calls": torch.int64}
        outputs, calls = ddp(inputs_of(0, 0, 0))["nested"]
        assert (outputs.dtype, int(calls)) == (FP32, 1)  # parameters stay in full: only buffers were asked for

    with_ddp(body, Buffered(), mixed_precision=_MixedPrecision(buffer_dtype=FP16))

    ignoring = Buffered()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["scale"])
    with_ddp(lambda ddp: None, ignoring, mixed_precision=MixedPrecision(buffer_dtype=FP16))
    assert ignoring.scale.dtype is FP32


# ---- refusals ----


@pytest.mark.parametrize(
    ("dtypes", "complaint"),
    [
        ({}, "expected a dtype in mixed_precision, found none"),
        ({"param_dtype": torch.int8}, "expected param_dtype to be a floating point dtype, found torch.int8"),
        ({"reduce_dtype": "float16"}, "expected reduce_dtype to be a floating point dtype, found float16"),
    ],
)
def test_dtypes_that_cannot_be_meant_are_refused(dtypes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=complaint):
        MixedPrecision(**dtypes)


@pytest.mark.ranks
def test_a_hook_beside_a_dtype_to_reduce_in_is_refused() -> None:
    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("never called")

    def refused(ddp: DistributedDataParallel) -> None:
        with pytest.raises(MisuseError, match=r"averages gradients in torch\.bfloat16.*use only one"):
            ddp.register_comm_hook(None, hook)
        with pytest.raises(MisuseError, match="use only one"):
            ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)

    with_ddp(refused, Plain())
    with_ddp(lambda ddp: ddp.register_comm_hook(None, hook), Buffered(), mixed_precision=MixedPrecision(buffer_dtype=FP16))


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_layers_are_refused_by_name_unless_they_have_nothing_to_cast() -> None:
    layers = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.jit.script(torch.nn.Linear(2, 2)), torch.jit.script(torch.nn.Tanh())
    )
    with pytest.raises(MisuseError, match=r"layer '1' is a ScriptModule, whose parameters mixed_precision cannot replace"):
        with_ddp(lambda ddp: None, layers)
    with_ddp(lambda ddp: ddp(torch.ones(1, 3)).sum().backward(), torch.nn.Sequential(layers[0], layers[2]))


@pytest.mark.ranks
def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"averages in torch\.bfloat16 dense gradients only: use sparse=False"):
        with_ddp(lambda ddp: None, torch.nn.Embedding(3, 2, sparse=True))


def test_a_copy_computes_with_its_own_parameters() -> None:
    init_process_group("in_process", world_size=1)
    try:
        ddp = DistributedDataParallel(Recurrent(), mixed_precision=MixedPrecision(BF16))
        copied = copy.deepcopy(ddp)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.zero_()
        copied(inputs_of(0, 0, 0), call=0).float().square().mean().backward()
        assert all(p.grad is None for p in ddp.parameters())
        assert all(p.grad is not None and bool(p.grad.any()) for p in copied.parameters())
    finally:
        destroy_process_group()


@pytest.mark.ranks
@pytest.mark.parametrize("dtypes", [{"reduce_dtype": FP16}, {"param_dtype": BF16}])
def test_complex_gradients_are_averaged_in_their_own_dtype(dtypes: dict[str, torch.dtype]) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (self.weight * inputs).real.sum()

    def body(group: ProcessGroup) -> torch.Tensor:
        model = DistributedDataParallel(Scaled(), process_group=group, mixed_precision=MixedPrecision(**dtypes))
        model(torch.tensor([1 + 2j, 3 - 4j]) * (group.rank + 1)).backward()
        gradient = model.module.weight.grad
        assert isinstance(gradient, torch.Tensor)
        return gradient

    for gradient in run_ranks(2, body):
        assert torch.equal(gradient, torch.tensor([1.5 - 3j, 4.5 + 6j]))


class Writing(torch.nn.Module):
    """Its forward writes into parameters, in one of the ways that people use."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.way = way
        self.query, self.key = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        self.key.requires_grad_(False)
        torch.nn.init.zeros_(self.key.weight)
        self.words = torch.nn.Embedding(5, 4, max_norm=0.5 if way == "max_norm" else None)
        torch.nn.init.constant_(self.words.weight, 1 / 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        key, query = self.key.weight, self.query.weight
        if self.way == "in place":
            with torch.no_grad():
                key.lerp_(query, 0.5)
        elif self.way == "data":
            key.data.mul_(0.5).add_(query.data, alpha=0.5)
        elif self.way == "new data":
            key.data = key.data * 0.5 + query.data * 0.5
        elif self.way == "some":
            query.data[1].clamp_(min=0.0)
        elif self.way == "replaced":
            self.key.weight = torch.nn.Parameter(query.detach() * 0.5)
        return self.query(inputs) + self.key(inputs) + self.words(torch.tensor([2])).sum()


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["in place", "data", "new data"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_forward_writes_into_parameters_stays(way: str, mode: Callable[[], Any]) -> None:
    def body(ddp: DistributedDataParallel) -> None:
        query = ddp.module.query.weight.detach().clone()
        version = ddp.module.key.weight._version
        with mode():
            for _ in range(2):
                ddp(inputs_of(0, 0, 0))
        torch.testing.assert_close(ddp.module.key.weight, query * 0.75, rtol=EPSILON, atol=0, check_dtype=True)
        assert torch.equal(ddp.module.query.weight, query)
        assert ddp.module.key.weight._version > version

    with pytest.warns(
        UserWarning, match=r"writes into parameter 'key\.weight', which mixed_precision rounds to torch\.bfloat16"
    ):
        with_ddp(body, Writing(way))


@pytest.mark.ranks
def test_only_elements_that_forward_has_written_are_rounded() -> None:
    module = Writing("some")
    before = module.query.weight.detach().clone()
    with torch.no_grad():
        module.query.weight[0, 0] = before[0, 0] = math.nan
    assert (before[1] < 0).any()

    with pytest.warns(UserWarning, match=r"'query\.weight'"):
        with_ddp(lambda ddp: ddp(inputs_of(0, 0, 0)), module)
    after = module.query.weight.detach()
    assert torch.equal(after[2], before[2])
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0, equal_nan=True)
    assert after[1].tolist() == [max(0.0, x) for x in before[1].tolist()]


@pytest.mark.ranks
def test_an_embedding_with_a_largest_norm_renormalises_its_own_rows_only() -> None:
    module = Writing("max_norm")
    with pytest.warns(UserWarning, match=r"'words\.weight'"):
        with_ddp(lambda ddp: ddp(inputs_of(0, 0, 0)).float().sum().backward(), module)
    torch.testing.assert_close(module.words.weight[2].norm(), torch.tensor(0.5), rtol=EPSILON, atol=0)
    assert torch.equal(module.words.weight[3], torch.full((4,), 1 / 3))


@pytest.mark.ranks
def test_a_forward_that_writes_nothing_leaves_parameters_as_they_are(recwarn: pytest.WarningsRecorder) -> None:
    module = Writing("not at all")
    versions = [parameter._version for parameter in module.parameters()]
    with_ddp(lambda ddp: ddp(inputs_of(0, 0, 0)), module)
    assert [parameter._version for parameter in module.parameters()] == versions
    assert not recwarn.list


@pytest.mark.ranks
def test_a_parameter_that_forward_replaces_is_not_lost_in_silence() -> None:
    with pytest.raises(MisuseError, match=r"puts another tensor in the place of parameter 'key\.weight'"):
        with_ddp(lambda ddp: ddp(inputs_of(0, 0, 0)), Writing("replaced"))


# ---- a forward computes with what the module has when it begins ----


def assigned(ddp: DistributedDataParallel) -> None:
    ddp.module.load_state_dict({name: tensor * 3 for name, tensor in ddp.module.state_dict().items()}, assign=True)


def another_module(ddp: DistributedDataParallel) -> None:
    ddp.module = copy.deepcopy(ddp.module)
    with torch.no_grad():
        ddp.module.first.weight.mul_(3)  # type: ignore[union-attr, operator]


def another_layer(ddp: DistributedDataParallel) -> None:
    ddp.module.head = torch.nn.Linear(8, 3)


def a_layer_that_nobody_registers(ddp: DistributedDataParallel) -> None:
    ddp.module._modules["head"] = torch.nn.Linear(8, 3)


def weight_norm(ddp: DistributedDataParallel) -> None:
    torch.nn.utils.parametrizations.weight_norm(ddp.module.first)  # type: ignore[arg-type]


CHANGES = [assigned, another_module, another_layer, a_layer_that_nobody_registers, weight_norm]


@pytest.mark.ranks
@pytest.mark.parametrize("change", CHANGES)
def test_evaluation_computes_with_a_module_that_has_changed(change: Callable[[DistributedDataParallel], None]) -> None:
    def body(ddp: DistributedDataParallel) -> None:
        ddp(inputs_of(0, 0, 0), call=0).sum().backward()
        change(ddp)
        with torch.no_grad():
            outputs = ddp(inputs_of(0, 0, 0), call=0)
            assert torch.equal(outputs, copy.deepcopy(ddp.module).bfloat16()(inputs_of(0, 0, 0).bfloat16(), call=0))
        # The next forward with gradients follows the change.
        ddp.zero_grad()
        ddp(inputs_of(0, 1, 0), call=0).sum().backward()
        assert {p.grad.dtype for p in ddp.parameters() if p.grad is not None} == {FP32}

    with_ddp(body, Plain(), find_unused_parameters=True)


@pytest.mark.ranks
@pytest.mark.parametrize("change", CHANGES)
def test_a_backward_after_a_change_leaves_the_changed_module_as_it_is(
    change: Callable[[DistributedDataParallel], None],
) -> None:
    def body(ddp: DistributedDataParallel) -> None:
        outputs = ddp(inputs_of(0, 0, 0), call=0)
        with ddp.no_sync():
            change(ddp)
            before = {name: id(tensor) for part in ddp.modules() for name, tensor in part._parameters.items()}
            with torch.no_grad():
                ddp(inputs_of(0, 0, 0), call=0)
        outputs.sum().backward()
        assert before == {name: id(tensor) for part in ddp.modules() for name, tensor in part._parameters.items()}

    with_ddp(body, Plain())


@pytest.mark.ranks
def test_buffers_of_a_module_that_has_changed_are_converted_in_evaluation() -> None:
    def body(ddp: DistributedDataParallel) -> None:
        ddp.module = Buffered()
        with torch.no_grad():
            ddp(torch.ones(2, 4))
        assert {b.dtype for b in ddp.buffers() if b.is_floating_point()} == {BF16}

    with_ddp(body, Buffered(), mixed_precision=MixedPrecision(buffer_dtype=BF16))


@pytest.mark.ranks
@pytest.mark.parametrize("has_gradients", [True, False])
def test_functional_call_computes_with_the_given_tensors(has_gradients: bool) -> None:
    def body(ddp: DistributedDataParallel) -> None:
        weight = (ddp.module.first.weight.detach() * 3).requires_grad_()  # type: ignore[union-attr, operator]
        with torch.set_grad_enabled(has_gradients):
            outputs = torch.func.functional_call(ddp, {"module.first.weight": weight}, (inputs_of(0, 0, 0), 0))
        low = copy.deepcopy(ddp.module).bfloat16()
        given = weight.detach().bfloat16().requires_grad_()
        expected = torch.func.functional_call(low, {"first.weight": given}, (inputs_of(0, 0, 0).bfloat16(), 0))
        assert torch.equal(outputs, expected)
        if has_gradients:
            (found,) = torch.autograd.grad(outputs.sum(), [weight])
            assert torch.equal(found.bfloat16(), torch.autograd.grad(expected.sum(), [given])[0])

    with_ddp(body, Plain())


@pytest.mark.ranks
def test_parameters_that_the_script_has_converted_stay_parameters() -> None:
    def body(ddp: DistributedDataParallel) -> None:
        ddp.to(BF16)
        with torch.no_grad():
            ddp(inputs_of(0, 0, 0).bfloat16(), call=0)
        assert {type(p) for p in ddp.parameters()} == {torch.nn.Parameter}
        assert {p.dtype for p in ddp.parameters()} == {BF16}

    with_ddp(body, Plain())


class Pausing(torch.nn.Module):
    """In a forward it first calls what is in `pauses`, once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.pauses: list[Callable[[], None]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pauses:
            self.pauses.pop()()
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("pauses_in", ["forward", "backward"])
@pytest.mark.parametrize("second", ["forward", "backward"])
def test_a_second_thread_is_refused_and_leaves_no_cast_in_the_module(pauses_in: str, second: str) -> None:
    def body(group: ProcessGroup) -> None:
        module = Pausing()
        model = DistributedDataParallel(
            module, process_group=group, forward_sync_buffers=False, mixed_precision=MixedPrecision(param_dtype=BF16)
        )
        x = torch.ones(3, 2, requires_grad=True)
        refused: list[str] = []
        with model.no_sync():
            earlier = model(x).sum()

        def run() -> None:
            with pytest.raises(MisuseError, match="two threads run a module with mixed_precision at once") as raised:
                earlier.backward() if second == "backward" else torch.no_grad()(model)(x)
            refused.append(str(raised.value))

        def pause() -> None:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

        if pauses_in == "forward":
            module.pauses.append(pause)
        outputs = model(x)
        if pauses_in == "backward":
            # The output's own hook of the wrapper runs first, because it was registered first.
            outputs.register_hook(lambda _: pause())  # type: ignore[no-untyped-call]
        outputs.sum().backward()
        assert refused
        assert f"this one a {second}" in refused[0]
        assert [type(parameter) for parameter in module.linear._parameters.values()] == [torch.nn.Parameter] * 2
        # Nothing remains of either thread, so another thread may run the module now.
        with ThreadPoolExecutor(1) as threads:
            threads.submit(lambda: model(x).sum().backward()).result()

    run_ranks(1, body)


class Doubled(torch.nn.Linear):
    """Returns two outputs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), super().forward(2 * x)


def test_a_hook_of_a_backward_may_run_the_module_on_the_same_thread() -> None:
    """Between the two outputs of the outer backward."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Doubled(2, 2), process_group=group, mixed_precision=MixedPrecision(param_dtype=BF16))
        x, weight = torch.ones(3, 2), model.module.weight
        found: list[torch.Tensor] = []

        def hook(_: torch.Tensor) -> None:
            found.extend(torch.autograd.grad(earlier, [weight]))
            with torch.no_grad():
                found.append(model(x)[0])

        with model.no_sync():
            earlier = model(x)[0].sum()
            first, second = model(x)
            second.register_hook(hook)  # type: ignore[no-untyped-call]  # autograd comes to the latest output first
            (first.sum() + second.sum()).backward()
        assert [each.dtype for each in found] == [FP32, BF16]
        assert model.module.weight is weight

    run_ranks(1, body)


def test_threads_that_run_parts_of_one_backward_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for outputs on several devices. Here the second thread claims to run the first thread's backward."""
    monkeypatch.setattr(low_precision, "current_backward", lambda: 1)

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(
            torch.nn.Linear(2, 2), process_group=group, mixed_precision=MixedPrecision(param_dtype=BF16)
        )
        x, weight = torch.ones(3, 2), model.module.weight
        with model.no_sync():
            earlier, outputs = model(x).sum(), model(x)
            with ThreadPoolExecutor(1) as threads:
                outputs.register_hook(  # type: ignore[no-untyped-call]
                    lambda _: threads.submit(torch.autograd.grad, earlier, [weight]).result() and None
                )
                outputs.sum().backward()
        assert model.module.weight is weight

    run_ranks(1, body)


class FailingGroup:
    def all_reduce(self, *_: Any, **__: Any) -> Any:
        begun: torch.futures.Future[int] = torch.futures.Future()
        begun.set_result(0)
        failed = begun.then(lambda _: 1 // 0)
        return SimpleNamespace(get_future=lambda: failed)


@pytest.mark.parametrize("dtype", [FP32, torch.complex64])
def test_a_reduction_that_fails_is_an_error(dtype: torch.dtype) -> None:
    bucket: Any = SimpleNamespace(buffer=lambda: torch.ones(2, dtype=dtype), process_group=FailingGroup)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        average_in(BF16, bucket).wait()
