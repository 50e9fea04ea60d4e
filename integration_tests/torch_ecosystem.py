"""Programs built on torch.distributed, under one mpirun: each over "syncline", then over torch's Gloo.

    mpiexec -n 2 python torch_ecosystem.py PROGRAM FOLDER

Prints "EQUAL PROGRAM on rank R" if the numbers are the same. `PROGRAM` is the name of a function below.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import syncline.collectives.torch_backend  # noqa: F401 - registers

Tensors = dict[str, torch.Tensor]

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.gettempdir())
kept: list[object] = []  # Gloo's thread must not drop the last reference to its group


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()


def inputs(step: int) -> torch.Tensor:
    """Another batch for each rank and step."""
    return torch.linspace(-1, 1, 6 * 12, dtype=torch.float64).view(6, 12) * (1 + dist.get_rank() + 2 * step)


def steps(module: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        module(inputs(step)).square().mean().backward()
        optimizer.step()


def whole(state: dict[str, Any]) -> Tensors:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def checkpoint_with_resharding() -> Tensors:
    """Saved with shards over all ranks, loaded with shards over pairs; each pair is a replica."""
    folder = FOLDER / f"checkpoint-{dist.get_backend()}"
    saved = fully_shard(model())
    steps(saved)
    checkpoint.save(get_model_state_dict(saved), checkpoint_id=folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards"))
    loaded = fully_shard(model(seed=5), mesh=mesh)
    state = get_model_state_dict(loaded)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(loaded, state)
    expected, found = whole(saved.state_dict()), whole(loaded.state_dict())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return found


def compiled_ddp() -> Tensors:
    """The graph is split at the borders of DDP's buckets."""
    torch.manual_seed(dist.get_rank())
    wide = [torch.nn.Linear(12, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 4)]
    module = DistributedDataParallel(torch.nn.Sequential(*wide).double(), bucket_cap_mb=1)
    steps(torch.compile(module, backend="aot_eager"))
    return module.module.state_dict()


def compiled_collective() -> Tensors:
    """A collective inside compiled code becomes a functional one."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def doubled_and_summed(tensor: torch.Tensor) -> torch.Tensor:
        twice = tensor * 2
        dist.all_reduce(twice)
        return twice + 1

    return {"sum": doubled_and_summed(torch.arange(5.0) + dist.get_rank())}


def accelerate() -> Tensors:
    """Hugging Face Accelerate uses the existing group."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.process_index) == (dist.get_world_size(), dist.get_rank())
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    data = torch.linspace(-1, 1, 48 * 12, dtype=torch.float64).sin().view(48, 12)
    loader = DataLoader(TensorDataset(data), 6)
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    assert isinstance(module, DistributedDataParallel)
    seen = []
    for (batch,) in loader:
        optimizer.zero_grad()
        accelerator.backward(module(batch).square().mean())
        optimizer.step()
        seen.append(accelerator.gather_for_metrics(batch))
    accelerator.wait_for_everyone()
    torch.testing.assert_close(torch.cat(seen), data)
    return accelerator.unwrap_model(module).state_dict()


def fabric() -> Tensors:
    """Lightning Fabric finds the ranks by MPI, and uses the existing group."""
    from lightning_fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    lightning.launch()
    assert (lightning.world_size, lightning.global_rank) == (dist.get_world_size(), dist.get_rank())
    module = model(seed=lightning.global_rank)
    module, optimizer = lightning.setup(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))
    for step in range(3):
        optimizer.zero_grad()
        lightning.backward(module(inputs(step)).square().mean())
        optimizer.step()
    mean = lightning.all_reduce(torch.tensor(float(lightning.global_rank)))
    gathered = lightning.all_gather(torch.tensor([lightning.global_rank]))
    assert lightning.broadcast({"from": lightning.global_rank}) == {"from": 0}
    return {**module.state_dict(), "mean": mean, "gathered": gathered}


def lightning_trainer() -> Tensors:
    """Lightning's Trainer, with metrics that are averaged over the ranks, one of them an integer."""
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model(seed=dist.get_rank())

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.layers(batch[0]).square().mean()
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            rows = torch.tensor(len(batch[0]) + self.global_rank)
            self.log("rows", rows, sync_dist=True, reduce_fx="sum")
            self.log("mean", self.layers(batch[0]).mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    data = TensorDataset(torch.linspace(-1, 1, 48 * 12, dtype=torch.float64).sin().view(48, 12))
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=2,
        default_root_dir=FOLDER / dist.get_backend(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 6), DataLoader(data, 6))
    assert (trainer.world_size, trainer.global_step) == (dist.get_world_size(), 2 * 8 // dist.get_world_size())
    metrics = {name: value.double() for name, value in trainer.callback_metrics.items()}
    assert {"loss_epoch", "rows", "mean"} <= metrics.keys()
    written = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    return {**module.layers.state_dict(), **metrics, **{f"saved {name}": value for name, value in written.items()}}


def transformers_trainer() -> Tensors:
    """Hugging Face's Trainer with two small layers: gradient accumulation, a checkpoint to resume from, an evaluation."""
    import transformers
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    tokens = torch.arange(24 * 16).remainder(29).view(24, 16)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    folder = FOLDER / dist.get_backend()

    def trainer(steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        network = transformers.GPT2LMHeadModel(config)
        return transformers.Trainer(model=network, args=arguments, train_dataset=data, eval_dataset=data)

    first = trainer(2)
    first.train()
    assert isinstance(first.model_wrapped, DistributedDataParallel)
    assert (first.args.world_size, first.args.process_index) == (dist.get_world_size(), dist.get_rank())
    second = trainer(4)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert second.state.global_step == 4
    metrics = second.evaluate()
    return {**second.model.state_dict(), "eval_loss": torch.tensor(metrics["eval_loss"])}


def main(program: Callable[[], Tensors]) -> None:
    results = []
    for backend in ("syncline", "gloo"):
        dist.init_process_group(backend, init_method="mpi://")
        kept.append(dist.group.WORLD)
        assert dist.get_backend() == backend
        results.append(program())
        rank = dist.get_rank()
        dist.destroy_process_group()
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
    sys.stdout.write(f"EQUAL {program.__name__} on rank {rank}\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(globals()[sys.argv[1]])
