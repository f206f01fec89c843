"""Models that nobody here wrote, from transformers, timm and torchvision: are several ranks equal
to one process?

    python3.11 -m venv /tmp/other && . /tmp/other/bin/activate
    pip install -c constraints.txt torch==2.13.0
    pip install -c constraints.txt -e . torchvision timm transformers
    python benchmarks/models_elsewhere.py                       # all, on 2 and 3 ranks
    python benchmarks/models_elsewhere.py --ranks 4 llama vit   # names with one of these words

Each model is built small and at random from its configuration, without a download, and trained
three steps of SGD with momentum in float64 (also where its code asks for float32), in eval mode (no
dropout, fixed batch statistics), with numbers of rows that differ from rank to rank. Ranks are
threads; the plan is made for the link given, by default 100 Mbit/s, so that more than one strategy
has a turn. Columns: layers by strategy; the error of the worst tensor,
max|a − b| / max(max|a|, learning rate), of the ranks and of one process that cuts the batch as the
ranks do; whether every rank has the same bits. Ends with 1 if an error is above 1e-10. Not in CI:
elsewhere these packages come with a CUDA torch.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import copy
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# torchvision built for CUDA cannot load its operators beside a CPU torch; it then lacks the
# declarations of these two.
_DECLARED = torch.library.Library("torchvision", "FRAGMENT")
for _operator in ("nms", "qnms"):
    _DECLARED.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm
import torchvision
import transformers

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using
from shoal.session.session import current

ROWS, STEPS, LEARNING_RATE = 6, 3, 0.05
Batch = tuple[Any, Any]
State = dict[str, Tensor]

# ------------------------------------------------------------------------------------------------
# the models


def images(size: int, classes: int = 5) -> list[Batch]:
    """Noise and classes."""
    return [
        (torch.randn(ROWS, 3, size, size).double(), torch.randint(classes, (ROWS,)))
        for _ in range(STEPS)
    ]


def words(**more: Callable[[], Tensor]) -> list[Batch]:
    """Token ids with a mask, and labels inside the batch; the model returns its own loss."""
    made = {"input_ids": tokens, "attention_mask": mask, "labels": tokens, **more}
    return [({name: make() for name, make in made.items()}, None) for _ in range(STEPS)]


def tokens() -> Tensor:
    """Eight tokens a row."""
    return torch.randint(3, 99, (ROWS, 8))


def mask() -> Tensor:
    """The last tokens of every second row are padding."""
    kept = torch.ones(ROWS, 8, dtype=torch.long)
    kept[::2, 6:] = 0
    return kept


def labels() -> Tensor:
    """One of five classes a row."""
    return torch.randint(5, (ROWS,))


def bert() -> tuple[nn.Module, list[Batch]]:
    config = transformers.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=5,
    )
    return transformers.BertForSequenceClassification(config), words(labels=labels)


def gpt2() -> tuple[nn.Module, list[Batch]]:
    config = transformers.GPT2Config(vocab_size=99, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config), words()


def llama() -> tuple[nn.Module, list[Batch]]:
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config), words()


def mixtral() -> tuple[nn.Module, list[Batch]]:
    config = transformers.MixtralConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        experts_implementation="eager",  # the grouped product has no float64
    )
    return transformers.MixtralForCausalLM(config), words()


def t5() -> tuple[nn.Module, list[Batch]]:
    config = transformers.T5Config(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), words()


def bart() -> tuple[nn.Module, list[Batch]]:
    config = transformers.BartConfig(
        vocab_size=99,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
    )
    return transformers.BartForConditionalGeneration(config), words()


def vit() -> tuple[nn.Module, list[Batch]]:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    batches = [({"pixel_values": x, "labels": y}, None) for x, y in images(32)]
    return transformers.ViTForImageClassification(config), batches


def of_timm(name: str, size: int, **options: Any) -> Callable[[], tuple[nn.Module, list[Batch]]]:
    return lambda: (timm.create_model(name, num_classes=5, **options), images(size))


def of_torchvision(
    name: str, size: int, **options: Any
) -> Callable[[], tuple[nn.Module, list[Batch]]]:
    return lambda: (torchvision.models.get_model(name, num_classes=5, **options), images(size))


def torchvision_vit() -> tuple[nn.Module, list[Batch]]:
    vit = torchvision.models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=3,
        num_heads=4,
        hidden_dim=48,
        mlp_dim=96,
        num_classes=5,
    )
    return vit, images(32)


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Batch]]]] = {
    "transformers BERT classification": bert,
    "transformers GPT-2": gpt2,
    "transformers Llama": llama,
    "transformers Mixtral (experts)": mixtral,
    "transformers T5": t5,
    "transformers BART": bart,
    "transformers ViT": vit,
    "timm resnet18d": of_timm("resnet18d", 64),
    "timm vit_tiny": of_timm("vit_tiny_patch16_224", 32, img_size=32, depth=3),
    "timm mobilenetv3_small": of_timm("mobilenetv3_small_100", 64),
    "timm convnext_atto": of_timm("convnext_atto", 64),
    "timm gmixer_12": of_timm("gmixer_12_224", 32, img_size=32),
    "torchvision resnet18": of_torchvision("resnet18", 64),
    "torchvision alexnet": of_torchvision("alexnet", 64),
    "torchvision mobilenet_v3_small": of_torchvision("mobilenet_v3_small", 64),
    "torchvision vit": torchvision_vit,
    "torchvision swin_t": of_torchvision("swin_t", 64),
}

# ------------------------------------------------------------------------------------------------
# the comparison


class InFloat64(TorchFunctionMode):
    """Float64 also where a model's code asks for float32, as language models do in norms, softmax
    and loss.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(
            *map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()}
        )


def loss_of(
    model: nn.Module, batch: Batch, loss_fn: Callable[[Tensor, Tensor], Tensor] | None
) -> Tensor:
    """A model's loss on a batch: its own where there is no loss_fn."""
    x, y = batch
    with InFloat64():
        return model(**x).loss if loss_fn is None else loss_fn(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def alone(model: nn.Module, batches: Sequence[Batch], loss_fn: Any, parts: int) -> State:
    """Train in one process, the batch cut in as many parts as there are ranks."""
    model = copy.deepcopy(model)
    optimizer = sgd(model)
    for batch in batches:
        optimizer.zero_grad()
        for part in range(parts):
            share, mine = share_of(part, parts), rows_of(batch, part, parts)
            (loss_of(model, mine, loss_fn) * share).backward()
        optimizer.step()
    return state(model)


def on_ranks(
    model: nn.Module, batches: Sequence[Batch], loss_fn: Any, ranks: int, link: Link
) -> tuple[list[State], Counter[str]]:
    """Train on ranks: their states, and how many layers each strategy serves."""
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def work(comm: ThreadComm) -> tuple[State, Counter[str]]:
        model, mine = copies[comm.rank], [rows_of(batch, comm.rank, ranks) for batch in batches]
        with using(comm, Cluster(Topology(tuple(f"host{rank}" for rank in range(ranks))), link)):
            with InFloat64():
                model, loss, optimizer = shoal.parallelize(
                    model, loss_fn, sgd(model), sample=mine[0]
                )
            for batch in mine:
                optimizer.zero_grad()
                loss_of(model, batch, loss).backward()
                optimizer.step()
            plan = current().attached[model].plan
        return state(model), Counter(choice.strategy for choice in plan.choices)

    results = run(ranks, work, timeout_s=120)
    return [after for after, _ in results], results[0][1]


def state(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def bounds(rank: int, ranks: int) -> tuple[int, int]:
    """A rank's rows of the whole batch: each has more than the one before."""
    shares = ranks * (ranks + 1) // 2
    return ROWS * (rank * (rank + 1) // 2) // shares, ROWS * (
        (rank + 1) * (rank + 2) // 2
    ) // shares


def share_of(rank: int, ranks: int) -> float:
    first, last = bounds(rank, ranks)
    return (last - first) / ROWS


def rows_of(batch: Batch, rank: int, ranks: int) -> Any:
    first, last = bounds(rank, ranks)
    return pytree.tree_map(
        lambda leaf: leaf[first:last].clone() if isinstance(leaf, Tensor) else leaf, batch
    )


def difference(expected: State, got: State) -> float:
    """max|a − b| / max(max|a|, learning rate) of the worst tensor."""
    return max(
        float((a - got[name]).abs().max() / max(float(a.abs().max()), LEARNING_RATE))
        for name, a in expected.items()
        if a.is_floating_point() and a.numel()
    )


def lines(names: Sequence[str], ranks: Sequence[int], link: Link) -> Iterator[tuple[str, bool]]:
    """The table's lines, and whether each is as it should be."""
    for name in names:
        torch.manual_seed(0)
        model, batches = MODELS[name]()
        model = model.double().eval()
        loss_fn = None if batches[0][1] is None else F.cross_entropy
        whole = alone(model, batches, loss_fn, 1)
        assert difference(whole, state(model)) > 1e-3, "training changed nothing"
        size = sum(p.numel() for p in model.parameters())
        for count in ranks:
            head = f"{name:34} {size / 1e6:6.2f} M  {count:5}  "
            try:
                states, strategies = on_ranks(model, batches, loss_fn, count, link)
            except Exception:
                traceback.print_exc()
                yield head + "failed", False
                continue
            error, cut = (
                difference(whole, states[0]),
                difference(whole, alone(model, batches, loss_fn, count)),
            )
            same = all(torch.equal(states[0][key], other[key]) for other in states for key in other)
            served = ", ".join(
                f"{strategy} {layers}" for strategy, layers in sorted(strategies.items())
            )
            right = same and error <= 1e-10
            text = f"{served:28} {error:9.1e}  {cut:9.1e}  {'yes' if same else 'NO':9} "
            text += "" if right else "WRONG"
            yield head + text, right


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compare ranks with one process on models from elsewhere."
    )
    parser.add_argument(
        "words", nargs="*", help="parts of the names of the models to run; all by default"
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--mbit", type=float, default=100.0, help="the link to plan for, Mbit/s")
    given = parser.parse_args()
    names = [
        name
        for name in MODELS
        if not given.words or any(word in name.lower() for word in given.words)
    ]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, ", end="")
    print(f"timm {timm.__version__}, torchvision {torchvision.__version__}\n")
    print(
        f"{'model':34} {'parameters':9} ranks  {'layers served by':28} {'error':>9}  "
        f"{'cut alone':>9}  same bits"
    )
    good = True
    for text, right in lines(
        names, given.ranks, Link(latency_s=1e-4, bytes_per_s=given.mbit * 1e6 / 8)
    ):
        print(text, flush=True)
        good &= right
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
