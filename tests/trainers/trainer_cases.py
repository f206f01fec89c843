"""Hugging Face's Trainer on small models of its own, in this process, which may be one of several.

python trainer_cases.py FOLDER

Alone it trains by `Trainer` itself, so that test_transformers.py can compare.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import shoal
from shoal.integrations.transformers import ShoalMixin, ShoalTrainer

SIZE, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
TEXTS, LONGEST, WORDS, GLOBAL_BATCH = 21, 9, 24, 6
STOP_AT = 3

CASES: dict[str, dict[str, Any]] = {
    "tokens": {"pins": {"*": "sliced"}, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "best": {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    "head": {"pins": {"*lm_head": "head"}, "save_strategy": "epoch"},
    "resumed": {"pins": {"*mlp.*": "column"}, "save_strategy": "steps", "save_steps": STOP_AT},
    "grouped": {"train_sampling_strategy": "group_by_length", "bf16": True},
    "adapter": {"pins": {"*lora_A*": "sliced"}},
    "classes": {"train_sampling_strategy": "random", "gradient_accumulation_steps": 2},
    "sft": {"pins": {"*mlp*": "sliced"}, "gradient_accumulation_steps": 2},
}


class Texts(Dataset[dict[str, Tensor]]):
    """Made-up texts of unlike lengths."""

    def __init__(self, seed: int = 1) -> None:
        made = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, LONGEST + 1, (TEXTS,), generator=made)
        self.texts = [torch.randint(1, WORDS, (int(n),), generator=made) for n in lengths]

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[row], "row": torch.tensor(row)}


class Padded:
    """Pads texts to one length, and notes their rows."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, texts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.rows.append([int(text["row"]) for text in texts])
        ids = torch.zeros(len(texts), LONGEST, dtype=torch.long)
        labels = torch.full((len(texts), LONGEST), -100)
        for row, text in enumerate(texts):
            words = text["input_ids"]
            ids[row, : len(words)] = labels[row, : len(words)] = words
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels > 0).long()}


def model_of(case: str) -> Any:
    """Make a model from a config: GPT-2 with tied weights, or Llama."""
    torch.manual_seed(0)
    if case in ("tokens", "best"):
        sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **off, **ends)).double()
    if case == "classes":
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
        config = BertConfig(
            vocab_size=WORDS,
            num_hidden_layers=1,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **sizes,
        )
        return BertForSequenceClassification(config).double()
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    model: Any = LlamaForCausalLM(config)
    if case == "adapter":
        peft = import_module("peft")
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
    return model if case == "grouped" else model.double()


class Classes(Padded):
    """Gives each text one label, for a model whose loss takes no number of items."""

    def __call__(self, texts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = super().__call__(texts)
        return {**batch, "labels": batch["input_ids"][:, 0] % 2}


def sft_of(arguments: TrainingArguments, pins: Any) -> Any:
    """Make TRL's trainer, which is a subclass of Trainer."""
    trl, datasets, tokenizers = map(import_module, ("trl", "datasets", "tokenizers"))
    words = tokenizers.models.WordLevel({str(n): n for n in range(WORDS)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", eos_token="1", unk_token="0"
    )
    own = (
        "output_dir",
        "use_cpu",
        "num_train_epochs",
        "learning_rate",
        "report_to",
        "disable_tqdm",
    )
    own += ("per_device_train_batch_size", "gradient_accumulation_steps", "train_sampling_strategy")
    options = {name: getattr(arguments, name) for name in own}
    limits = {"max_length": 16, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1}
    configured = trl.SFTConfig(**options, **limits, save_strategy="no", eval_strategy="no")
    kind = trl.SFTTrainer if SIZE == 1 else type("Tuned", (ShoalMixin, trl.SFTTrainer), {})
    return kind(
        model_of("sft"),
        configured,
        train_dataset=datasets.Dataset.from_dict(
            {"input_ids": [text.tolist() for text in Texts().texts]}
        ),
        eval_dataset=datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * GLOBAL_BATCH}),
        processing_class=tokenizer,
        **({} if SIZE == 1 else {"pins": pins}),
    )


def trainer_of(case: str, folder: Path, **limits: Any) -> Any:
    options = {**CASES[case], **limits}
    pins = options.pop("pins", None)
    defaults = {"train_sampling_strategy": "sequential", "save_strategy": "no", "logging_steps": 1}
    arguments = TrainingArguments(
        **{
            **defaults,
            "output_dir": str(folder),
            "use_cpu": True,
            "num_train_epochs": 2,
            "learning_rate": 0.05,
            "warmup_steps": 2,
            "per_device_train_batch_size": GLOBAL_BATCH // SIZE,
            "per_device_eval_batch_size": GLOBAL_BATCH // SIZE,
            "report_to": [],
            "disable_tqdm": True,
            "remove_unused_columns": False,
            **options,
        }
    )
    data = {"train_dataset": Texts(), "eval_dataset": Texts(2), "data_collator": Padded()}
    if case == "sft":
        return sft_of(arguments, pins)
    if case == "classes":
        data["data_collator"] = Classes()
    if SIZE == 1:
        return Trainer(model_of(case), arguments, **data)
    return ShoalTrainer(model_of(case), arguments, pins=pins, **data)


def run(case: str, folder: Path) -> dict[str, Any]:
    """Train, evaluate and save. A resumed case goes on from what two ranks have saved."""
    trainer = trainer_of(case, folder / f"{case}-{SIZE}")
    last = None
    if case == "resumed" and SIZE == 3:
        last = str(folder / f"{case}-2" / f"checkpoint-{STOP_AT}")
    trainer.train(resume_from_checkpoint=last)
    rows = list(getattr(trainer.data_collator, "rows", ()))
    trainer.model.eval()
    plan = shoal.plan_of(trainer.model)
    record = {
        "rows": rows,
        "strategies": [] if plan is None else [choice.strategy for choice in plan.choices],
        "evaluated": trainer.evaluate()["eval_loss"],
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "logs": [log for log in trainer.state.log_history if "grad_norm" in log],
    }
    trainer.save_model(str(folder / f"{case}-{SIZE}" / "saved"))
    trainer.accelerator.free_memory()
    record["ordinary"] = shoal.plan_of(trainer.model) is None
    return record


def main(folder: Path) -> None:
    """Run all cases, on three ranks the one that goes on from two."""
    transformers.logging.set_verbosity_error()
    cases = ["resumed"] if SIZE == 3 else list(CASES)
    if find_spec("peft") is None and "adapter" in cases:
        cases.remove("adapter")
    if find_spec("trl") is None and "sft" in cases:
        cases.remove("sft")
    torch.save({case: run(case, folder) for case in cases}, folder / f"{SIZE}-{RANK}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
