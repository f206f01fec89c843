"""Published curves of scaling, beside what is simulated of the same models, hosts and links.

    .venv/bin/python benchmarks/published.py

A curve gives: parameters layer by layer, how many images a host computes in a second, rows a step,
the links, and what the system could do (its strategies here). Layers' times go by their
multiplications. Nothing is fitted; links are taken to give all that they have.

FireCaffe sends whole gradients up a tree and down again behind backward, level by level. Shoal has
no such exchange, so there are two lines: Shoal's own tree, and the paper's account of its one,
compute + 2·log2(P)·bytes ÷ rate.

Sources (docs/lab/foresight.md says what of them is confirmed): Zhang et al., "Poseidon", USENIX ATC
2017 (Titan X, 32 images a node), its abstract, and the authors' script that draws its figure of
VGG19-22K: 18.5 s for 20 steps of one node, 20.1 s on 32 nodes, 27.7 s where all goes by slices;
Sergeev and Del Balso, "Horovod", arXiv 1802.05799, and its README (4 Pascal GPUs a host, 25 Gbit/s
with RoCE), with TensorFlow's benchmarks for what a P100 does (VGG16, 64 images: 154 a second);
Iandola et al., "FireCaffe", CVPR 2016 (K20, Cray Gemini), its abstract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from shoal.core.facts import (
    Cluster,
    LayerProfile,
    Link,
    ModelProfile,
    ParameterProfile,
    Topology,
)
from shoal.core.foresight import Network, Question
from shoal.profiling.products import ProductFacts
from shoal_tools.simulate import simulate

GIGABIT = 1e9 / 8
_CORES, _LATENCY_S = 8.0, 1e-4  # beside a GPU; of a message


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
    byte_s: float = 1e-9  # of a processor for a byte, as over TCP
    levels: bool = False  # as the paper accounts for its tree
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
_TREE = "Shoal's tree flows in chunks, beside backward"
_RATE = "the network's rate and the GPU's are from memory"
CURVES = [
    Curve("Poseidon, VGG19-22K", vgg(VGG19, 21841), 34.6, 32, 32, 29.5, 40 * GIGABIT, _POSEIDON),
    Curve(
        "… by slices alone",
        vgg(VGG19, 21841),
        34.6,
        32,
        32,
        21.4,
        40 * GIGABIT,
        ("sliced",),
        why="not explained: here links give all, to three lanes of 1 ns a byte each",
    ),
    Curve("… at 10 Gbit/s", vgg(VGG19, 21841), 34.6, 32, 16, 15.5, 10 * GIGABIT, _POSEIDON),
    Curve("Poseidon, VGG19", vgg(VGG19, 1000), 35, 32, 32, 30, 40 * GIGABIT, _POSEIDON),
    Curve("Poseidon, Inception-V3", even(94, 27e6), 43, 32, 32, 31.5, 40 * GIGABIT, _POSEIDON),
    Curve(
        "Horovod, VGG-16 (4 GPUs a host)",
        vgg(VGG16, 1000),
        4 * 154,
        4 * 64,
        128,
        0.68 * 128,
        25 * GIGABIT,
        ("replicate",),
        byte_s=0.0,
        why="not explained: here RoCE gives all that the link has, and takes no processor",
    ),
    *(
        Curve(
            f"FireCaffe, {name}" + (", its tree" if levels else ""),
            even(layers, parameters),
            samples_per_s,
            1024,
            128,
            times,
            3e9,
            ("replicate",),
            strong=True,
            byte_s=0.0,
            levels=levels,
            why=_RATE if levels else _TREE,
        )
        for name, layers, parameters, samples_per_s, times in (
            ("GoogLeNet", 59, 13.5e6, 48, 47),
            ("NiN", 12, 7.6e6, 185, 39),
        )
        for levels in (False, True)
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
    if curve.levels:
        alone_s = curve.samples / curve.samples_per_s
        nbytes = 4 * sum(layer.inputs * layer.outputs for layer in curve.layers)
        sent_s = 2 * log2(curve.hosts) * nbytes / curve.bytes_per_s
        return alone_s / (alone_s / curve.hosts + sent_s)
    question = Question(
        Network(curve.bytes_per_s),
        strong=curve.strong,
        how={"strategies": list(curve.strategies)},
    )
    two = Topology(("one", "other"))  # that know what a byte takes of a processor
    known = Cluster(two, Link(_LATENCY_S, curve.bytes_per_s, curve.byte_s), _CORES)
    (scale,) = simulate(profile(curve), known, [curve.hosts], question).scales
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
