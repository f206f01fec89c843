"""Pipelines of models that register hooks on tensors in their forward."""

from __future__ import annotations

import pytest
from one_process import built, difference
from piped import Script, assert_same
from small_models import Gpt, of_words, words
from torch import Tensor, nn


class Doubling(Gpt):
    """A GPT in which a hook doubles the gradient between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_pre_hook(_double)


def _double(module: nn.Module, args: tuple[Tensor]) -> None:
    if args[0].requires_grad:
        args[0].register_hook(lambda grad: grad * 2)
        args[0].retain_grad()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_hook_on_a_tensor_runs_where_the_value_is_computed(ranks: int) -> None:
    script = Script(model=built(Doubling), batches=words(), loss_fn=of_words)
    assert_same(script, ranks)
    _, without = Script(model=built(Gpt), batches=words(), loss_fn=of_words).alone()
    assert difference(script.alone()[1], without) > 1e-3, "the hook changes training"
