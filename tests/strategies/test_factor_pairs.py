"""Pairs of factors that are kept: `.grad` shows them, and clearing it drops them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.core.errors import UsageError
from shoal.strategies.factor_gradients import FactorGradients
from shoal.strategies.factor_pairs import FactorPairs

pytestmark = pytest.mark.quick


def kept(target: nn.Parameter) -> FactorPairs:
    pairs = FactorPairs([target], "factor (fc)", 'pins={"fc": "replicate"}')
    pairs.add(torch.ones(1, 2), torch.ones(1, 3))
    pairs.mark()
    return pairs


def test_pairs_are_joined_in_their_order():
    pairs = FactorPairs([], "factor (fc)", "")
    assert not pairs
    left, right = torch.zeros(1, 2), torch.zeros(1, 3)
    pairs.add(left, right)
    assert pairs.joined()[0] is left and pairs.joined()[1] is right
    pairs.add(left + 1, right + 1)
    assert pairs.joined()[0].tolist() == [[0.0] * 2, [1.0] * 2]
    assert pairs.joined()[1].tolist() == [[0.0] * 3, [1.0] * 3]
    pairs.clear()
    assert not pairs


def test_a_mark_shows_in_grad_and_goes_away_again():
    target = nn.Parameter(torch.zeros(3, 2))
    pairs = kept(target)
    assert target.grad is not None and target.grad.untyped_storage().nbytes() == 4
    assert not pairs.drop_if_cleared()
    assert pairs and target.grad is None


@pytest.mark.parametrize("to_none", [True, False])
def test_who_clears_grad_drops_what_is_kept(to_none: bool):
    target = nn.Parameter(torch.zeros(3, 2))
    target.grad = torch.ones(3, 2)
    pairs = kept(target)
    if to_none:
        target.grad = None
    else:
        target.grad.zero_()
    assert pairs.drop_if_cleared() and not pairs


def test_any_other_change_of_grad_is_an_error():
    target = nn.Parameter(torch.zeros(3, 2))
    target.grad = torch.ones(3, 2)
    pairs = kept(target)
    target.grad.mul_(2)
    with pytest.raises(UsageError, match="a part is kept on this rank"):
        pairs.drop_if_cleared()


def test_a_gradient_is_its_buffer_or_has_it_added():
    target = nn.Parameter(torch.zeros(2))
    gradients = FactorGradients()
    gradients.begin([target])
    assert not gradients.accumulates(target)
    gradients.buffer(target).fill_(1.0)
    gradients.publish([target])
    assert target.grad is gradients.buffer(target)
    gradients.begin([target])
    assert gradients.accumulates(target)
    target.grad = torch.ones(2)  # the user's own
    gradients.begin([target])
    assert not gradients.accumulates(target)
    gradients.buffer(target).fill_(2.0)
    gradients.publish([target])
    assert target.grad.tolist() == [3.0, 3.0]
    assert gradients.tensors()[0] is gradients.buffer(target)
