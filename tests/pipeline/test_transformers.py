"""Pipelines of models of Hugging Face transformers, which return their own loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from apart import Apart
from apart import assert_same as assert_same_apart
from one_process import Batch, adamw, built, integers, sgd
from piped import LOOPS, Script, assert_same
from torch import nn

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

WORDS, LENGTH = 40, 7
USUAL = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 24}


def bert(**how: Any) -> nn.Module:
    config = transformers.BertConfig(
        **USUAL, num_attention_heads=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **how
    )
    return transformers.BertForMaskedLM(config)


def llama(**how: Any) -> nn.Module:
    config = transformers.LlamaConfig(**USUAL, num_attention_heads=2, num_key_value_heads=1, **how)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=16,
        n_layer=3,
        n_head=2,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "bert": bert,
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "t5": t5,
}


def texts(padded: bool) -> list[Batch]:
    """Batches as keyword arguments; with lengths of their own, or without a mask."""
    found: list[Batch] = []
    for step in range(5):
        ids = integers(WORDS, 12, LENGTH, seed=step)
        given = {"input_ids": ids, "labels": ids.clone()}
        if padded:
            given["attention_mask"] = (torch.arange(LENGTH) < 4 + ids[:, :1] % 4).long()
        found.append((given, None))
    return found


@pytest.mark.parametrize(
    ("name", "optimizer", "loop", "ranks", "padded"),
    [
        ("bert", sgd, "plain", 3, True),
        ("bert", adamw, "clipped", 2, False),
        ("llama", sgd, "accumulated", 3, False),
        ("llama", adamw, "with evaluation", 4, True),
        ("llama, tied", sgd, "clipped", 2, True),
        ("gpt2", sgd, "plain", 2, False),
        ("t5", sgd, "plain", 2, True),
    ],
)
def test_ranks_get_what_one_process_gets(
    name: str, optimizer: Any, loop: str, ranks: int, padded: bool
) -> None:
    tried = Script(
        model=built(MODELS[name]),
        batches=texts(padded),
        loss_fn=None,
        optimizer=optimizer,
        loop=LOOPS[loop],
    )
    assert_same(tried, ranks)


APART = {
    "bert": {
        "*": "replicate",
        "bert.encoder.layer.1.*": "pipeline:2",
        "bert.encoder.layer.2.*": "pipeline:3",
        "cls.*": "pipeline:3",
    },
    "gpt2": {
        "*": "pipeline:0",
        "transformer.h.0.*": "pipeline:1",
        "transformer.h.1.*": "pipeline:2",
        "transformer.h.2.*": "pipeline:3",
    },
}


@pytest.mark.parametrize(
    ("name", "optimizer", "loop", "padded"),
    [("bert", adamw, "clipped", True), ("gpt2", sgd, "plain", False)],
)
def test_hosts_without_rows_hold_the_end_or_the_middle(
    name: str, optimizer: Any, loop: str, padded: bool
) -> None:
    make = (lambda: bert(tie_word_embeddings=False)) if name == "bert" else gpt2
    tried = Script(
        model=built(make),
        batches=texts(padded),
        loss_fn=None,
        optimizer=optimizer,
        loop=LOOPS[loop],
    )
    assert_same_apart(Apart(tried, 2, 2), APART[name])
