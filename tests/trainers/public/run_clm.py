"""Hugging Face's run_clm: logits made small for metrics, a model that is saved, perplexity."""

import math
from typing import Any

from made import LONGEST, WORDS, Blocks
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

# author: from transformers import Trainer
from shoal.integrations.transformers import ShoalTrainer as Trainer  # shoal


def main(args: Any) -> Any:
    parser = HfArgumentParser((TrainingArguments,))
    (training_args,) = parser.parse_dict(args.told)
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LONGEST, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).double()
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if embedding_size < WORDS + 2:
        model.resize_token_embeddings(WORDS + 2)
    with training_args.main_process_first(desc="grouping texts together"):
        lm_datasets = {"train": Blocks(37, 1), "validation": Blocks(11, 2)}
    train_dataset = lm_datasets["train"]
    eval_dataset = lm_datasets["validation"]

    def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
        if isinstance(logits, tuple):
            logits = logits[0]
        return logits.argmax(dim=-1)

    def compute_metrics(eval_preds: Any) -> Any:
        preds, labels = eval_preds
        labels = labels[:, 1:].reshape(-1)
        preds = preds[:, :-1].reshape(-1)
        return {"accuracy": float((preds == labels).mean()), "words": len(labels)}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    metrics = train_result.metrics
    metrics["train_samples"] = len(train_dataset)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    found = trainer.evaluate()
    found["eval_samples"] = len(eval_dataset)
    found["perplexity"] = math.exp(found["eval_loss"])
    trainer.log_metrics("eval", found)
    trainer.save_metrics("eval", found)
    trainer.create_model_card(tasks="text-generation")
    return model, {**found, "train_loss": metrics["train_loss"]}
