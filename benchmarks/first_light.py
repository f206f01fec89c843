"""The first set of figures: tuned DDP ÷ Shoal in a lab of four hosts, each line one `shoal bench`
under `shoal lab`.

    sudo .venv/bin/python benchmarks/first_light.py [NAME ...]      some hours for all; figures in
                                                                    results/NAME.json

Needs root and Linux (the lab). Both contenders take turns in one run; DDP has the best of several
bucket sizes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
HOSTS = 4


@dataclass(frozen=True)
class Case:
    """One recipe, of examples/ or by its path from here, at one link rate; few steps where a DDP
    step is long.
    """

    recipe: str
    rate: str
    rounds: int
    steps: int
    against: str = "ddp"

    @property
    def name(self) -> str:
        """What the result file is called."""
        return f"{Path(self.recipe).name}-{self.rate}"

    def command(self) -> list[str]:
        """The whole command line."""
        python = str(Path(sys.executable))
        path = (
            f"benchmarks/{self.recipe}.py" if "/" in self.recipe else f"examples/{self.recipe}.py"
        )
        bench = ["bench", path, "--against", self.against]
        bench += [
            "--rounds",
            str(self.rounds),
            "--steps",
            str(self.steps),
            "--json",
            f"benchmarks/results/{self.name}.json",
        ]
        lab = [python, "-m", "shoal", "lab", "--hosts", str(HOSTS), "--rate", self.rate, "--"]
        return [*lab, python, "-m", "shoal", *bench]


CASES = [
    Case("alexnet", "1gbit", rounds=5, steps=3, against="ddp,plain"),
    Case("resnet18", "none", rounds=12, steps=4),
    Case("alexnet", "200mbit", rounds=4, steps=2),
    Case("resnet18", "1gbit", rounds=12, steps=4),
    Case("resnet50", "1gbit", rounds=7, steps=3),
    Case("digits", "1gbit", rounds=7, steps=20),
    Case("gpt", "1gbit", rounds=7, steps=4),
    Case("resnet18", "100mbit", rounds=3, steps=1),
    Case("resnet50", "none", rounds=7, steps=3),
    Case("resnet50", "100mbit", rounds=3, steps=1),
    Case("resnet50", "200mbit", rounds=3, steps=1),
    Case("alexnet", "none", rounds=6, steps=3),
    Case("alexnet", "100mbit", rounds=2, steps=1),
    Case("gpt", "100mbit", rounds=4, steps=2),
    Case("gpt", "200mbit", rounds=4, steps=4),
    Case("gpt", "none", rounds=8, steps=4),
    Case("digits", "100mbit", rounds=4, steps=4),
    Case("digits", "none", rounds=8, steps=20),
    Case("arcface", "100mbit", rounds=8, steps=20),
    Case("arcface", "1gbit", rounds=8, steps=20),
    Case("arcface", "none", rounds=8, steps=10),
    Case("./gpt25m", "500mbit", rounds=5, steps=2),
    Case("./gpt25m", "1gbit", rounds=5, steps=2, against="ddp,plain"),
    Case("./gpt25m", "1500mbit", rounds=5, steps=2, against="ddp,plain"),
    Case("recipes/vgg11", "300mbit", rounds=4, steps=2),
    Case("recipes/vit", "300mbit", rounds=5, steps=4),
    Case("recipes/lstm", "300mbit", rounds=4, steps=3),
    Case("recipes/mobilenet", "300mbit", rounds=5, steps=4),
    Case("recipes/unet", "300mbit", rounds=4, steps=2),
    Case("recipes/perceptron", "300mbit", rounds=5, steps=8),
    Case("recipes/vit", "2gbit", rounds=8, steps=5),
    Case("recipes/mobilenet", "2gbit", rounds=10, steps=5),
    Case("recipes/unet", "2gbit", rounds=8, steps=4),
]


def main(cases: Sequence[Case]) -> None:
    """Run those of the cases that the command line names, or all, and print a table."""
    wanted = sys.argv[1:] or [case.name for case in cases]
    (HERE / "results").mkdir(exist_ok=True)
    for case in cases:
        if case.name in wanted:
            subprocess.run(case.command(), cwd=HERE.parent, check=True)
    print(
        "| recipe, link | Shoal | DDP | DDP ÷ Shoal (95 %) | predicted ÷ measured | measured ÷ "
        "floor |"
    )
    print("|---|---|---|---|---|---|")
    for case in cases:
        path = HERE / "results" / f"{case.name}.json"
        if path.exists():
            print(row(case, json.loads(path.read_text())))


def row(case: Case, figures: dict) -> str:
    """One line of the table in docs/lab/benchmarks.md."""
    median, ratio = figures["median_s"], figures["ratio_to_shoal"]["ddp"]
    interval = f"**{ratio['median']:.2f}** ({ratio['low']:.2f} to {ratio['high']:.2f})"
    predicted, floor = (
        figures["predicted_s"] / median["shoal"],
        median["shoal"] / figures["floor_s"],
    )
    cells = (
        f"{median['shoal']:.3f} s",
        f"{median['ddp']:.3f} s",
        interval,
        f"{predicted:.2f}",
        f"{floor:.2f}",
    )
    return f"| {Path(case.recipe).name}, {case.rate} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main(CASES)
