"""Models whose fat layers are worth cutting over the ranks: tuned DDP ÷ Shoal in a lab of four
hosts.

    sudo .venv/bin/python benchmarks/cut_layers.py [NAME ...]      forty minutes for all; figures in
                                                                   results/NAME.json

Each line is one `shoal bench` under `shoal lab`, as in first_light.py, which has AlexNet. DDP's
steps are long: few of them are taken.
"""

from __future__ import annotations

from first_light import Case, main

CASES = [
    Case("recipes/classes200k", "1gbit", rounds=4, steps=2, against="ddp,plain"),
    Case("recipes/alexnet22k", "1gbit", rounds=4, steps=2, against="ddp,plain"),
    Case("recipes/clicks", "1gbit", rounds=4, steps=2, against="ddp,plain"),
    Case("recipes/words50k", "1gbit", rounds=4, steps=2, against="ddp,plain"),
    Case("recipes/classes200k", "200mbit", rounds=2, steps=1),
]


if __name__ == "__main__":
    main(CASES)
