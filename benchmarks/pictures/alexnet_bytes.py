"""Draws docs/alexnet-bytes.svg: what each layer of AlexNet sends in a step, before and after.

    python benchmarks/pictures/alexnet_bytes.py

Four hosts at 1 Gbit/s are imagined. "Before" is all-reduce of every gradient, as plain data
parallelism does it. "After" is what the planner chooses. The model is measured here, so another
machine may choose otherwise for a layer whose traffic hides anyway.
"""

from __future__ import annotations

import sys
from pathlib import Path

import shoal
from shoal.comm.threads import ThreadComm
from shoal.planner.explain import explain
from shoal.profiling.layers import profile_model

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import alexnet  # noqa: E402  (a recipe, which is in no package)

RANKS = 4
# drawn for a phone's width, where 13 pixels are still 10, and shown no wider than SHOWN
WIDTH, SHOWN, ROW, LEFT, RIGHT, TOP = 470, 640, 34, 88, 116, 44
BARS = WIDTH - LEFT - RIGHT
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .small { fill: #57606a } .before { fill: #c8ccd1 } .after { fill: #0f8b8d }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .before { fill: #6e7681 } .after { fill: #35c4c6 }
  }
"""


def layers() -> list[tuple[str, str, float, float]]:
    """Of each layer: its name, its way, and megabytes that a rank sends before and after."""
    model, loss_fn = alexnet.model(), alexnet.loss()
    optimizers = [alexnet.optimizer(model.parameters())]
    sample = tuple(next(iter(alexnet.data())))
    profile = profile_model(model, loss_fn, optimizers, sample, ThreadComm())
    link = shoal.Link(latency_s=1e-4, bytes_per_s=125e6)
    cluster = shoal.Cluster(shoal.Topology(tuple(f"h{r}" for r in range(RANKS))), link, 2.0)
    plan = shoal.plan(model, loss_fn, optimizers, sample=sample, cluster=cluster)
    rows = explain(plan, profile, cluster).layers
    return [
        (
            row.layer,
            row.chosen.choice.way,
            2 * 4 * row.parameters * (RANKS - 1) / RANKS / 1e6,
            row.chosen.sent_bytes / 1e6,
        )
        for row in reversed(rows)
    ]


def drawn(rows: list[tuple[str, str, float, float]]) -> str:
    """The picture as SVG text."""
    most = max(before for _, _, before, _ in rows)
    total = [sum(row[column] for row in rows) for column in (2, 3)]
    height = TOP + ROW * len(rows) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{SHOWN}" height="{SHOWN * height // WIDTH}" role="img" '
        'aria-label="Megabytes that each layer of AlexNet sends in a step, before and after">',
        f"<style>{STYLE}</style>",
        '<text x="4" y="18">Megabytes that a rank sends in a step, four hosts at 1 Gbit/s</text>',
        '<text x="4" y="34" class="small">grey: all-reduce of every gradient · '
        "colour: what Shoal chose</text>",
    ]
    for number, (name, way, before, after) in enumerate(rows):
        y = TOP + ROW * number
        widths = [max(1.0, BARS * value / most) for value in (before, after)]
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 19}" text-anchor="end">{name}</text>',
            f'<rect x="{LEFT}" y="{y + 4}" width="{widths[0]:.1f}" height="11" class="before"/>',
            f'<rect x="{LEFT}" y="{y + 16}" width="{widths[1]:.1f}" height="11" class="after"/>',
            f'<text x="{LEFT + widths[0] + 6:.1f}" y="{y + 20}">{before:.3g} → {after:.3g} '
            f'<tspan class="small">{way}</tspan></text>',
        ]
    lines += [
        f'<text x="{LEFT}" y="{height - 8}">all layers: {total[0]:.0f} → {total[1]:.1f} MB</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "alexnet-bytes.svg").write_text(drawn(layers()))
