"""A small GPT that learns to write, character by character: gradient accumulation, and gradients that travel compressed.

    mpirun -n 2 python small_gpt.py
    mpirun -n 2 python small_gpt.py --hook powersgd --accumulate 2

The text is made of random sentences, so there is nothing to download.
"""

from __future__ import annotations

import argparse
import random
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from syncline.collectives import ReduceOp, all_reduce, default_device, destroy_process_group, init_process_group
from syncline.ddp import DistributedDataParallel
from syncline.hooks import PowerSGDState, bf16_compress_hook, powerSGD_hook

CONTEXT, WIDTH, HEADS, LAYERS, BATCH, STEPS_OF_AN_EPOCH = 32, 64, 4, 2, 8, 20


def make_text(sentences: int = 2000) -> str:
    draw = random.Random(0)
    nouns, verbs, places = ("cat", "dog", "bird", "child"), ("sees", "hears", "follows"), ("house", "river", "tree")
    return "".join(
        f"the {draw.choice(nouns)} {draw.choice(verbs)} the {draw.choice(nouns)} near the {draw.choice(places)}.\n"
        for _ in range(sentences)
    )


class SmallGPT(torch.nn.Module):
    """Takes characters `[batch, length]`; returns the logits of the next ones, `[batch, length, characters]`."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = torch.nn.Embedding(characters, WIDTH)
        self.positions = torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        hidden = self.characters(text) + self.positions(torch.arange(length, device=text.device))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        return self.head(self.layers(hidden, mask, is_causal=True))


def compress(model: DistributedDataParallel, hook: str) -> None:
    if hook == "bf16":  # half the bytes
        model.register_comm_hook(None, bf16_compress_hook)
    elif hook == "powersgd":  # a product of two thin matrices for each large gradient
        model.register_comm_hook(PowerSGDState(matrix_approximation_rank=4, start_powerSGD_iter=10), powerSGD_hook)


def main() -> torch.nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="default: 4")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes for each step (default: 2)")
    parser.add_argument("--hook", choices=["none", "bf16", "powersgd"], default="none", help="how gradients travel")
    options = parser.parse_args()

    group = init_process_group()
    device = default_device()
    text = make_text()
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text], device=device)
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallGPT(len(alphabet)).to(device))
    compress(model, options.hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(group.rank)  # each rank reads other places of the text
    if group.rank == 0:
        print(f"{group.size} ranks, {options.accumulate} backward passes for each step, hook: {options.hook}", flush=True)

    for epoch in range(options.epochs):
        total = torch.zeros((), device=device)
        for _ in range(STEPS_OF_AN_EPOCH):
            optimizer.zero_grad()
            for part in range(options.accumulate):
                starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=draw).to(device)
                windows = data[starts + torch.arange(CONTEXT + 1, device=device)]
                is_last = part == options.accumulate - 1
                with nullcontext() if is_last else model.no_sync():  # only the last backward communicates
                    logits = model(windows[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / options.accumulate
                    loss.backward()
                total += loss.detach()
            optimizer.step()
        total /= STEPS_OF_AN_EPOCH
        all_reduce(total, ReduceOp.AVG)
        if group.rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)

    if group.rank == 0:  # model.module communicates nothing, so one rank may call it alone
        written = [alphabet.index("\n")]
        for _ in range(80):
            logits = model.module(torch.tensor([written[-CONTEXT:]], device=device))[0, -1]
            written.append(int(torch.multinomial(logits.detach().softmax(0), 1)))
        print("".join(alphabet[index] for index in written).strip(), flush=True)
    destroy_process_group()
    return model.module


if __name__ == "__main__":
    main()
