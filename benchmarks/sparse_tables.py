"""A recommender with 26 tables of sparse gradients: tuned DDP ÷ Shoal in a lab of four hosts.

    sudo .venv/bin/python benchmarks/sparse_tables.py      some minutes; figures in
                                                           results/recommender-1gbit.json

One `shoal bench` under `shoal lab`, as in first_light.py. Under DDP the tables are sparse too: each
is a bucket of its own, and gloo sums it by gathering ids and values.
"""

from __future__ import annotations

from first_light import Case, main

CASES = [Case("recipes/recommender", "1gbit", rounds=6, steps=5, against="ddp,plain")]


if __name__ == "__main__":
    main(CASES)
