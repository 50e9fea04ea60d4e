"""Code on top of torch.distributed, unmodified, over backend "syncline-mpi": the same numbers as over torch's own Gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import syncline.collectives.torch_backend  # noqa: F401 - registers
from syncline.collectives.startup.launch import detect_launch

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),  # FSDP2 calls what torch has renamed
    pytest.mark.filterwarnings("ignore:DTensor random operators may not:UserWarning"),  # torch 2.6, on CPUs
]

FSDP2_NEEDS_A_GPU = TorchVersion(torch.__version__) < "2.7"

STEPS = 2
Tensors = dict[str, torch.Tensor]
Program = Callable[[], Tensors]

kept: list[object] = []  # Gloo's thread must not drop the last reference to its group


@contextmanager
def torch_world(backend: str) -> Iterator[None]:
    """The whole set-up. torch's Gloo finds the ranks through MPI, too."""
    dist.init_process_group(backend, init_method="mpi://")
    try:
        assert dist.get_backend() == backend
        kept.append(dist.group.WORLD)
        yield
    finally:
        dist.destroy_process_group()


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    return torch.nn.Sequential(*layers).double()


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, same_data: bool = False) -> None:
    dataset = TensorDataset(torch.linspace(-1, 1, 48 * 12, dtype=torch.float64).sin().view(48, 12))
    sampler = DistributedSampler(dataset, seed=7) if not same_data else DistributedSampler(dataset, 1, 0, seed=7)
    for epoch in range(STEPS):
        sampler.set_epoch(epoch)
        for (inputs,) in DataLoader(dataset, 12, sampler=sampler):
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()


def whole(state: dict[str, torch.Tensor | DTensor]) -> Tensors:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def native_ddp() -> Tensors:
    """Each rank begins with another model, and rank 0's counts. Small buckets, so that there are several."""
    module = DistributedDataParallel(model(dist.get_rank()), bucket_cap_mb=0.001)
    train(module, sgd(module))
    return module.module.state_dict()


def native_ddp_with_a_cast() -> Tensors:
    module = DistributedDataParallel(model().float())
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    inputs = torch.linspace(-1, 1, 24).view(2, 12) * (1 + dist.get_rank())
    module(inputs).square().mean().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def native_ddp_with_power_sgd() -> Tensors:
    """The hook's callbacks issue further collectives."""
    module = DistributedDataParallel(model().float())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        module.zero_grad()
        inputs = torch.linspace(-1, 1, 24).view(2, 12) * (1 + step + dist.get_rank())
        module(inputs).square().mean().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def native_ddp_with_uneven_inputs() -> Tensors:
    """torch's reducer waits for a work that only C++ holds."""
    module = DistributedDataParallel(model())
    optimizer = sgd(module)
    with module.join(divide_by_initial_world_size=False):
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            module(torch.full((2, 12), 1.0 + step + dist.get_rank(), dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    return module.module.state_dict()


def fsdp2() -> Tensors:
    """FSDP2 gathers into a view of the output."""
    module = model()
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(module)
    train(module, sgd(module))
    return whole(module.state_dict())


def dtensor() -> Tensors:
    """Tensor parallelism: the first layer's columns, the third's rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(module, sgd(module), same_data=True)
    return whole(module.state_dict())


def zero() -> Tensors:
    module = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.01)
    train(module, optimizer)
    optimizer.consolidate_state_dict(0)
    steps = [entry["step"] for entry in optimizer.state_dict()["state"].values()] if dist.get_rank() == 0 else []
    return {**module.module.state_dict(), **{f"step {index}": step for index, step in enumerate(steps)}}


def two_dimensions() -> Tensors:
    """Shards inside a pair of ranks, replicas over the pairs: sub-groups of all kinds."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards"))
    module = model()
    fully_shard(module, mesh=mesh)
    train(module, sgd(module))
    return whole(module.state_dict())


PROGRAMS: dict[str, tuple[Program, float]] = {
    "native_ddp": (native_ddp, 1e-12),
    "native_ddp_with_a_cast": (native_ddp_with_a_cast, 1e-2),
    "native_ddp_with_power_sgd": (native_ddp_with_power_sgd, 1e-4),
    "native_ddp_with_uneven_inputs": (native_ddp_with_uneven_inputs, 1e-12),
    "fsdp2": (fsdp2, 1e-12),
    "dtensor": (dtensor, 1e-12),
    "zero": (zero, 1e-12),
    "two_dimensions": (two_dimensions, 1e-12),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_like_gloo(name: str) -> None:
    launch = detect_launch(os.environ)
    assert launch is not None
    if launch.world_size not in (2, 4):
        pytest.skip("on 2 and on 4 ranks")
    program, rtol = PROGRAMS[name]
    if FSDP2_NEEDS_A_GPU and program in (fsdp2, two_dimensions):
        pytest.skip("this torch's FSDP2 needs a GPU")
    with torch_world("syncline-mpi"):
        ours = program()
    with torch_world("gloo"):
        torchs = program()
    assert ours.keys() == torchs.keys()
    assert ours
    for entry, expected in torchs.items():
        torch.testing.assert_close(ours[entry], expected, rtol=rtol, atol=rtol)
