"""Hugging Face's run_glue: texts of unlike lengths, evaluation and prediction of all rows."""

import os
from typing import Any

import numpy as np
from made import Pairs, bert_config, padded
from transformers import (
    AutoModelForSequenceClassification,
    EvalPrediction,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

# author: from transformers import Trainer
from shoal.integrations.transformers import ShoalTrainer as Trainer  # shoal


def main(args: Any) -> Any:
    parser = HfArgumentParser((TrainingArguments,))
    (training_args,) = parser.parse_dict(args.told)
    set_seed(training_args.seed)
    config = bert_config(num_labels=2, finetuning_task="mrpc")
    model = AutoModelForSequenceClassification.from_config(config).double()
    model.config.label2id = {"same": 0, "other": 1}
    with training_args.main_process_first(desc="dataset map pre-processing"):
        train_dataset, eval_dataset, predict_dataset = Pairs(37, 1), Pairs(11, 2), Pairs(9, 3)

    def compute_metrics(p: EvalPrediction) -> Any:
        preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        preds = np.argmax(preds, axis=1)
        return {"accuracy": (preds == p.label_ids).astype(np.float32).mean().item()}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        data_collator=padded,
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    metrics = train_result.metrics
    metrics["train_samples"] = len(train_dataset)
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    found = trainer.evaluate(eval_dataset=eval_dataset)
    found["eval_samples"] = len(eval_dataset)
    trainer.log_metrics("eval", found)
    trainer.save_metrics("eval", found)

    predictions = trainer.predict(predict_dataset, metric_key_prefix="predict").predictions
    predictions = np.argmax(predictions, axis=1)
    output_predict_file = os.path.join(training_args.output_dir, "predict_results.txt")
    if trainer.is_world_process_zero():
        with open(output_predict_file, "w") as writer:
            writer.writelines(f"{index}\t{item}\n" for index, item in enumerate(predictions))
    trainer.create_model_card(tasks="text-classification")
    return model, {**found, "predicted": predictions.tolist()}
