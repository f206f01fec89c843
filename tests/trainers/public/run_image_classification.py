"""Hugging Face's run_image_classification: a ViT, columns kept, the best model at the end."""

from typing import Any

import numpy as np
import torch
from made import Images
from transformers import (
    AutoModelForImageClassification,
    HfArgumentParser,
    TrainingArguments,
    ViTConfig,
    set_seed,
)

# author: from transformers import Trainer
from shoal.integrations.transformers import ShoalTrainer as Trainer  # shoal


def collate_fn(examples: Any) -> Any:
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["labels"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


def main(args: Any) -> Any:
    parser = HfArgumentParser((TrainingArguments,))
    told = {
        "remove_unused_columns": False,
        "load_best_model_at_end": True,
        "save_strategy": "epoch",
    }
    (training_args,) = parser.parse_dict({**args.told, **told, "eval_strategy": "epoch"})
    set_seed(training_args.seed)
    names = ("pixel_values", "labels")
    dataset = {"train": Images(37, 1, names), "validation": Images(11, 2, names)}
    labels = ["a", "b", "c", "d", "e"]

    def compute_metrics(p: Any) -> Any:
        return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}

    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, image_size=8, patch_size=4,
        label2id={label: index for index, label in enumerate(labels)},
        id2label=dict(enumerate(labels)),
    )  # fmt: skip
    model = AutoModelForImageClassification.from_config(config).double()
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["validation"],
        compute_metrics=compute_metrics,
        data_collator=collate_fn,
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()
    found = trainer.evaluate()
    trainer.log_metrics("eval", found)
    trainer.save_metrics("eval", found)
    trainer.create_model_card(tasks="image-classification")
    return model, found
