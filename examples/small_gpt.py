"""A small GPT learns to write, with gradient accumulation and compressed gradients.

    mpirun -n 2 python small_gpt.py
    mpirun -n 2 python small_gpt.py --hook powersgd --accumulate 4

The text is made of random sentences, so there is nothing to download.
"""

from __future__ import annotations

import argparse
import random
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from syncline.collectives import (
    ReduceOp,
    all_reduce,
    default_device,
    destroy_process_group,
    init_process_group,
)
from syncline.ddp import DistributedDataParallel
from syncline.hooks import PowerSGDState, bf16_compress_hook, powerSGD_hook

CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 2
BATCH, STEPS_PER_EPOCH = 8, 20


def make_text(sentences: int = 2000) -> str:
    draw = random.Random(0)
    nouns, verbs = ("cat", "dog", "bird", "child"), ("sees", "hears", "follows")
    words = [map(draw.choice, (nouns, verbs, nouns)) for _ in range(sentences)]
    return "".join(f"the {who} {does} the {whom}.\n" for who, does, whom in words)


class SmallGPT(torch.nn.Module):
    """From characters `[batch, length]` to logits `[batch, length, alphabet]`."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.characters = torch.nn.Embedding(alphabet, WIDTH)
        self.positions = torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, None, False)
        self.head = torch.nn.Linear(WIDTH, alphabet)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.characters(text) + self.positions(places)
        is_later = places > places[:, None]  # no character sees the ones after it
        return self.head(self.layers(hidden, is_later, is_causal=True))


def main() -> torch.nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="backwards in a step")
    parser.add_argument("--hook", choices=["none", "bf16", "powersgd"], default="none")
    options = parser.parse_args()

    group = init_process_group()
    device = default_device()
    if group.rank == 0:
        print(f"{group.size} ranks over {group.describe()}", flush=True)
    text = make_text()
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(each) for each in text], device=device)
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallGPT(len(alphabet)).to(device))
    if options.hook == "bf16":  # half the bytes
        model.register_comm_hook(None, bf16_compress_hook)
    elif options.hook == "powersgd":  # two thin matrices for each large gradient
        state = PowerSGDState(matrix_approximation_rank=4, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    draw = torch.Generator().manual_seed(group.rank)  # each rank reads other places
    for epoch in range(options.epochs):
        total = torch.zeros((), device=device)
        for _ in range(STEPS_PER_EPOCH):
            optimizer.zero_grad()
            for part in range(options.accumulate):
                starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=draw)
                windows = data[(starts + torch.arange(CONTEXT + 1)).to(device)]
                is_last = part == options.accumulate - 1
                # Only the last backward of a step communicates.
                with nullcontext() if is_last else model.no_sync():
                    logits = model(windows[:, :-1]).flatten(0, 1)
                    loss = F.cross_entropy(logits, windows[:, 1:].flatten())
                    (loss / options.accumulate).backward()
                total += loss.detach() / (options.accumulate * STEPS_PER_EPOCH)
            optimizer.step()
        all_reduce(total, ReduceOp.AVG)  # now it is the same on all ranks
        if group.rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)

    if group.rank == 0:  # `model.module` communicates nothing: one rank may use it alone
        written = [alphabet.index("\n")]
        for _ in range(60):
            logits = model.module(torch.tensor([written[-CONTEXT:]], device=device))
            written.append(int(torch.multinomial(logits[0, -1].detach().softmax(0), 1)))
        print("".join(alphabet[index] for index in written).strip())
    destroy_process_group()
    return model.module


if __name__ == "__main__":
    main()
