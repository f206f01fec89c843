"""Learning price: how many times the samples a lossy way needs for the loss of exact steps.

A way with a price of 1.5 pays only if its step is more than 1.5 times as short. Each codec keeps
its price as data, with the page that has the measurement (`Codec.learning`). planner/learning.py
finds the price of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LearningPrice:
    """Price of a lossy way in samples.

    Args:
        times: samples for a loss, as a multiple of the samples of exact steps. 1: nothing is lost.
        source: the page with the measurement, and the task. '' if it was not measured.

    Examples:
        >>> from shoal.contracts.learning import LearningPrice
        >>> LearningPrice(1.4, "docs/lab/codecs.md").is_near
        False
    """

    times: float = 1.0
    source: str = ""

    @property
    def is_near(self) -> bool:
        """Whether a measurement says that the way loses nothing."""
        return bool(self.source) and self.times <= 1


UNMEASURED = LearningPrice()
# sources: a GPT of 500 steps from random weights and a network on digits, three seeds
NOTHING_LOST = LearningPrice(1.0, "docs/lab/codecs.md, text and digits")
LATER = "docs/lab/codecs.md, text from random weights"
