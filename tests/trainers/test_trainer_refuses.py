"""`ShoalTrainer` refuses early, with the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import shoal
from shoal.integrations.transformers import ShoalTrainer


def test_a_model_on_a_meta_device() -> None:
    with pytest.raises(shoal.UsageError, match="on a meta device"):
        ShoalTrainer(nn.Linear(4, 2, device="meta"))


def test_a_model_that_is_wrapped_already() -> None:
    with pytest.raises(shoal.UsageError, match="DataParallel is around the model already"):
        ShoalTrainer(model=nn.DataParallel(nn.Linear(4, 2)))


def test_a_model_that_is_parallelised_already() -> None:
    model = nn.Linear(4, 2)
    shoal.parallelize(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(shoal.UsageError, match="parallelised already"):
        ShoalTrainer(model=model)


def test_a_word_that_nobody_takes() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'pin'"):
        ShoalTrainer(nn.Linear(4, 2), pin={})
