"""The Trainer of transformers on a small language model, with an evaluation over all ranks."""

import tempfile

import torch
import transformers


def main():
    transformers.set_seed(6)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    tokens = torch.arange(24 * 16).remainder(29).view(24, 16)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=3,
        )
        assert options.world_size > 1
        trainer = transformers.Trainer(
            model=transformers.GPT2LMHeadModel(config), args=options, train_dataset=data, eval_dataset=data
        )
        trainer.train()
        metrics = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    print(f"loss {options.process_index} {[loss.hex() for loss in losses]} {metrics['eval_loss'].hex()}\n", end="")


if __name__ == "__main__":
    main()
