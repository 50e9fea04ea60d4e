"""Hugging Face's Trainer over MPI: a GPT-2 with two small layers learns to count.

    mpirun -n 2 python hf_trainer.py

The group must exist before the TrainingArguments, which then use it. The model comes from
a configuration, so nothing is downloaded. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import transformers

import syncline.collectives.torch_backend  # noqa: F401 - registers "syncline" and `mpi://`

WORDS, LENGTH, SEQUENCES = 32, 16, 256


class PrintLoss(transformers.TrainerCallback):
    def on_log(self, arguments, state, control, logs, **_):  # noqa: ARG002 - the Trainer's
        if state.is_world_process_zero and "loss" in logs:  # the mean over all ranks
            print(
                f"epoch {logs['epoch']:.0f}: loss {float(logs['loss']):.4f}", flush=True
            )


def main() -> torch.nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    dist.init_process_group("syncline", init_method="mpi://")
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks over the backend {dist.get_backend()}",
            flush=True,
        )
    transformers.set_seed(0)  # the same sequences on all ranks: the Trainer divides them
    starts = torch.randint(WORDS, (SEQUENCES, 1))
    sequences = (starts + torch.arange(LENGTH)) % WORDS
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        save_strategy="no",
        use_cpu=True,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        ddp_find_unused_parameters=False,  # each backward uses all of them
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": each, "labels": each} for each in sequences],
        callbacks=[PrintLoss],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    dist.destroy_process_group()
    return trainer.model


if __name__ == "__main__":
    main()
