"""What goes through the end of a model on one of its hosts, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Some rows of a pass: whose, and of which micro-batch."""

    worker: int
    index: int
    rows: int
    back: bool  # its gradient goes to the worker


@dataclass
class Pass:
    """What has gone through the tail at once: a micro-batch of all of this host's workers, or all of theirs."""

    blocks: list[Block]
    taken: Tensor
    put_out: Tensor

    def outputs(self, of: Tensor) -> list[tuple[Block, Tensor]]:
        """The blocks' parts of something that has the output's rows."""
        more, less = len(self.put_out), max(len(self.taken), 1)
        return list(zip(self.blocks, of.split([block.rows * more // less for block in self.blocks]), strict=True))


@dataclass
class Forward:
    """A forward of the model, with the rows of all of this host's workers."""

    waiting: list[tuple[Block, Tensor]] = field(default_factory=list)  # for others to be joined with
    passes: list[Pass] = field(default_factory=list)
    whole: dict[int, Tensor] = field(default_factory=dict)  # each worker's output, apart from the tail's graph
    losses: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # of each worker, by number
