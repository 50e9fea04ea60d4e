"""Accelerate with no config file. Without a GPU it wants to be told, under torchrun as well."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=not torch.cuda.is_available())
set_seed(4)
assert accelerator.num_processes > 1
model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.linspace(-1, 1, 48 * 10).sin().view(48, 10)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=6, shuffle=True)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    gathered = accelerator.gather_for_metrics(loss.detach().view(1))
    assert gathered.shape == (accelerator.num_processes,)
    print(f"loss {accelerator.process_index} {epoch} {loss.item().hex()} {gathered.sum().item().hex()}\n", end="")
with accelerator.main_process_first():
    accelerator.print("trained")
accelerator.wait_for_everyone()
accelerator.end_training()
