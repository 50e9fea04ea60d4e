"""Ignite: `idist` finds the variables, and a metric is reduced over all ranks."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.metrics import RunningAverage


def training(local_rank):
    rank = idist.get_rank()
    torch.manual_seed(12)
    model = idist.auto_model(torch.nn.Linear(5, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.3))

    def step(engine, batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")

    @trainer.on(Events.EPOCH_COMPLETED)
    def report(engine):
        total = idist.all_reduce(torch.tensor(engine.state.output))
        print(f"loss {rank} {engine.state.epoch} {engine.state.metrics['loss'].hex()} {total.item().hex()}\n", end="")

    batches = [torch.arange(15.0).view(3, 5).mul(rank + 1 + step).sin() for step in range(4)]
    trainer.run(batches, max_epochs=2)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)
