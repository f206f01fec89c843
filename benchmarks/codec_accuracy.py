"""What codecs cost in accuracy: the same samples in the same order, exact and with each codec.

    .venv/bin/python benchmarks/codec_accuracy.py digits        a quarter of an hour of one core
    .venv/bin/python benchmarks/codec_accuracy.py text          twenty minutes of one core

Tasks and judging are those of accuracy.py: 0.5 points, or 0.5 % of the loss. Every layer is coded,
but for embeddings. A codec whose terms an exchange can add on its way is also tried so. Curves go
to results/codecs-TASK.json after each run; a run that is there already is not made again. At the
end it prints a table, and draws docs/lab/codecs-TASK.svg.
"""

from __future__ import annotations

from functools import partial

from accuracy import HERE, RANKS, Runs, Task, parser, task_named, trained
from torch import nn

from shoal.codecs.coded_exchange import read_codec
from shoal.contracts.codec import Codec, LinearCodec
from shoal.core.registry import of

ADDED = "replicate:allreduce"  # an exchange that adds on its way
PART = 0.005  # of the loss


def coded(task: Task, pin: str) -> dict[str, str]:
    """Pins of every layer, in which embeddings go exactly; the last that matches holds."""
    modules = task.model().named_modules()
    tables = [name for name, module in modules if isinstance(module, nn.Embedding)]
    return {"*": pin, **dict.fromkeys(tables, pin.partition("+")[0])}


def name_of(way: str) -> str:
    """What the picture calls a way, such as "low_rank, added"."""
    exchange, _, codec = way.partition("+")
    return codec + (", added" if exchange == ADDED else "") if codec else "exact"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int)
    options.add_argument("--every", type=int, default=25)
    options.add_argument("--codecs", nargs="*", default=list(of(Codec)))
    options.add_argument("--way", default="sliced:direct")
    options.add_argument("--exact-steps", type=int, default=0, help="before codecs begin")
    asked = options.parse_args()
    task = task_named(asked.task)
    steps, every, exact_steps = asked.steps or task.steps, asked.every, asked.exact_steps
    about = {"task": asked.task, "steps": steps, "every": every, "ranks": RANKS}
    name = asked.task
    if exact_steps:
        about, name = {**about, "exact_steps": exact_steps}, f"{name}-after-{exact_steps}"
    runs = Runs(asked.out or HERE / f"results/codecs-{name}.json", about)
    linear = [codec for codec in asked.codecs if isinstance(read_codec(codec), LinearCodec)]
    coded_ways = [f"{asked.way}+{codec}" for codec in asked.codecs]
    ways = [asked.way, *coded_ways, *(f"{ADDED}+{codec}" for codec in linear)]
    how = {"steps": steps, "every": every, "exact_steps": exact_steps}
    made = {way: partial(trained, task, **how, pins=coded(task, way)) for way in ways}
    runs.make(made, asked.seeds)
    picture = HERE.parent / f"docs/lab/codecs-{name}.svg"
    runs.show(task, PART, picture, {way: name_of(way) for way in runs.curves})


if __name__ == "__main__":
    main()
