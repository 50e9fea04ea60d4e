"""Lightning's Trainer over MPI, with handwritten digits.

    mpirun -n 2 python lightning_trainer.py

The group must exist before the Trainer: Lightning then uses it, and starts no processes.
Needs pytorch-lightning and scikit-learn.
"""

from __future__ import annotations

import argparse

import pytorch_lightning as lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import syncline.collectives.torch_backend  # noqa: F401 - registers "syncline" and `mpi://`


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        # sync_dist: the mean over all ranks.
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"].item()
        self.print(
            f"epoch {self.current_epoch + 1}: loss {loss:.4f}", flush=True
        )  # on rank 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> torch.nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    dist.init_process_group("syncline", init_method="mpi://")
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"{ranks} ranks over the backend {dist.get_backend()}", flush=True)
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    data = TensorDataset((pixels / 16).float(), labels)
    model = Digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=ranks,  # of one node; on several nodes say num_nodes, too
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, 32, shuffle=True))  # Lightning divides it by rank
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
