"""Hugging Face's Trainer on all ranks: one import is another one.

torchrun --nproc-per-node 2 examples/trainers/hugging_face.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from shoal.integrations.transformers import ShoalTrainer as Trainer  # the changed line


class Counting(Dataset[dict[str, Tensor]]):
    """Made-up texts: numbers that go up by one."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        words = (torch.arange(12) + row) % 32
        return {"input_ids": words, "labels": words}


def main() -> None:
    """Train a small GPT-2 from a config, and evaluate it."""
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir="run",
        use_cpu=not torch.cuda.is_available(),
        num_train_epochs=4,
        per_device_train_batch_size=8,
        learning_rate=0.005,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
