"""Published curves of scaling, beside what is simulated of the same models, hosts and links.

    .venv/bin/python benchmarks/published.py

A curve gives: parameters layer by layer, how many images a host computes in a second, rows a step,
the links, and what the system could do (its strategies here). Layers' times go by their
multiplications. Nothing is fitted; links are taken to give all that they have.

Sources: Zhang et al., "Poseidon", USENIX ATC 2017, section 5 (Titan X, 40 Gbit/s Ethernet, 32
images a node); Sergeev and Del Balso, "Horovod", arXiv 1802.05799 (P100, 4 a host, 25 Gbit/s);
Iandola et al., "FireCaffe", CVPR 2016, tables 5 and 6 (K20, Cray Gemini).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from shoal.core.facts import (
    Cluster,
    LayerProfile,
    Link,
    ModelProfile,
    ParameterProfile,
    Topology,
)
from shoal.core.foresight import Network, Question
from shoal.planner.simulate import simulate
from shoal.profiling.products import ProductFacts

GIGABIT = 1e9 / 8
_CORES = 8.0  # beside a GPU


@dataclass(frozen=True)
class Layer:
    """Inputs and outputs of the layer as a product, and rows a sample."""

    inputs: int
    outputs: int
    rows: int = 1

    @property
    def work(self) -> float:
        """Multiplications a sample."""
        return float(self.inputs * self.outputs * self.rows)


@dataclass(frozen=True)
class Curve:
    """A published point, and what it was measured with."""

    name: str
    layers: Sequence[Layer]
    samples_per_s: float  # of a host
    samples: int  # a step and host, or of all hosts where `strong`
    hosts: int
    times: float  # as fast as one host, as published
    bytes_per_s: float
    strategies: tuple[str, ...]
    strong: bool = False
    why: str = ""  # it is not so here


def convolutions(*blocks: tuple[int, int, int, int]) -> list[Layer]:
    """Convolutions of 3 × 3: (number, inputs, outputs, width of the image) a block."""
    return [
        Layer(9 * (inputs if first == 0 else outputs), outputs, width * width)
        for number, inputs, outputs, width in blocks
        for first in range(number)
    ]


def even(count: int, parameters: float) -> list[Layer]:
    """So many layers that take as long as one another, each with twice the inputs a quarter on."""
    weights = [2 ** (4 * i / count) for i in range(count)]
    sizes = [parameters * weight / sum(weights) for weight in weights]
    return [Layer(int(size / 256), 256, max(1, int(1e6 / size))) for size in sizes]


def vgg(convolution: Sequence[Layer], classes: int) -> list[Layer]:
    """With its three fully connected layers."""
    return [*convolution, Layer(25088, 4096), Layer(4096, 4096), Layer(4096, classes)]


VGG19 = convolutions(
    (2, 3, 64, 224), (2, 64, 128, 112), (4, 128, 256, 56), (4, 256, 512, 28), (4, 512, 512, 14)
)
VGG16 = convolutions(
    (2, 3, 64, 224), (2, 64, 128, 112), (3, 128, 256, 56), (3, 256, 512, 28), (3, 512, 512, 14)
)
_POSEIDON = "sliced", "factor", "replicate"
_TREE = "its tree sends level by level behind backward; ours flows in chunks, beside it"
CURVES = [
    Curve("Poseidon, VGG19-22K", vgg(VGG19, 21841), 34, 32, 32, 30, 40 * GIGABIT, _POSEIDON),
    Curve("Poseidon, VGG19", vgg(VGG19, 1000), 35, 32, 32, 30, 40 * GIGABIT, _POSEIDON),
    Curve("Poseidon, VGG19", vgg(VGG19, 1000), 35, 32, 16, 15.5, 10 * GIGABIT, _POSEIDON),
    Curve("Poseidon, Inception-V3", even(94, 27e6), 43, 32, 32, 31.5, 40 * GIGABIT, _POSEIDON),
    Curve(
        "Horovod, VGG-16 (4 GPUs a host)",
        vgg(VGG16, 1000),
        4 * 140,
        4 * 64,
        128,
        0.68 * 128,
        25 * GIGABIT,
        ("replicate",),
        why="not explained: a byte is taken to cost 1 ns of a processor, as over TCP",
    ),
    Curve(
        "FireCaffe, GoogLeNet",
        even(59, 13.5e6),
        48,
        1024,
        128,
        47,
        3e9,
        ("replicate",),
        strong=True,
        why=_TREE,
    ),
    Curve(
        "FireCaffe, NiN",
        even(12, 7.6e6),
        185,
        1024,
        128,
        39,
        3e9,
        ("replicate",),
        strong=True,
        why=_TREE,
    ),
]


def profile(curve: Curve) -> ModelProfile:
    """A host's step as it would be measured: a third of it forward, two thirds backward."""
    step_s = curve.samples / curve.samples_per_s
    work = sum(layer.work for layer in curve.layers)
    made, done = [], 0.0
    for number, layer in enumerate(curve.layers):
        share, rows = layer.work / work, layer.rows * curve.samples
        done += share
        name = f"layer {number}"
        product_s = share * step_s / 3
        made.append(
            LayerProfile(
                name,
                "Linear" if layer.rows == 1 else "Conv2d",
                (
                    ParameterProfile(
                        f"{name}.weight",
                        (layer.outputs, layer.inputs),
                        layer.inputs * layer.outputs,
                        4,
                        used=True,
                        ready_s=(1 - done + share) * step_s * 2 / 3,
                    ),
                ),
                rows=rows,
                inputs=layer.inputs,
                outputs=layer.outputs,
                needed_s=(done - share) * step_s / 3,
                forward_s=share * step_s / 3,
                backward_s=share * step_s * 2 / 3,
                facts=(ProductFacts(s_per_row=product_s / rows, own_s=product_s),),
            )
        )
    return ModelProfile(tuple(made[::-1]), step_s / 3, step_s * 2 / 3, 0.0, digest=curve.name)


def simulated(curve: Curve) -> float:
    """How many times as fast as one host."""
    question = Question(
        Network(curve.bytes_per_s),
        strong=curve.strong,
        how={"strategies": list(curve.strategies)},
    )
    alone = Cluster(Topology(("here",)), Link(0.0, inf), _CORES)
    (scale,) = simulate(profile(curve), alone, [curve.hosts], question).scales
    return scale.times


def main() -> None:
    """Print every curve."""
    print("| curve | hosts | published | simulated | off | why |\n|---|---|---|---|---|---|")
    for curve in CURVES:
        times = simulated(curve)
        off = times / curve.times - 1
        why = curve.why if abs(off) > 0.15 else ""
        print(
            f"| {curve.name} | {curve.hosts} | {curve.times:g} | {times:.1f} | {off:+.0%} | {why} |"
        )


if __name__ == "__main__":
    main()
