"""Odd forwards, losses and loops: in a pipeline they train as in one process, or are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_models import (
    ChangesInput,
    ChangesItems,
    Checkpointed,
    Counts,
    FillsZeros,
    InnerCheckpoint,
    KeepsMap,
    LikeTransformers,
    Looks,
    PartsViews,
    Returns,
    Skips,
    SkipsInTurn,
    SumsTerms,
    WithinNoGrad,
)
from pipeline_trials import (
    CLASSES,
    PINS,
    Blocks,
    a_step,
    assert_as_one_process,
    batch,
    errors_of,
    pins_of,
    piped,
    squares,
)
from torch import Tensor, nn

import shoal
from shoal.core.errors import PlanError, ShoalError, UsageError

slow = pytest.mark.slow


def of_first(output: Any, y: Tensor) -> Tensor:
    return squares(output[0], y)


def of_both(output: Any, y: Tensor) -> Tensor:
    return squares(output[0], y) + output[1]


def of_logits(output: Any, y: Tensor) -> Tensor:
    return squares(output["logits"], y)


@dataclass(frozen=True)
class Output:
    """What some models return."""

    logits: Tensor
    hidden: Any = None


FORWARDS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "fills zeros": (FillsZeros, squares),
    "changes its input": (ChangesInput, squares),
    "changes what has crossed": (ChangesItems, squares),
    "within no_grad": (WithinNoGrad, squares),
    "like those of transformers": (LikeTransformers, of_first),
    "sums terms of blocks": (SumsTerms, of_both),
    "a dict": (lambda: Returns(lambda out: {"logits": out, "rows": len(out)}), of_logits),
    "a dataclass": (lambda: Returns(Output), lambda output, y: squares(output.logits, y)),
    "a tuple": (lambda: Returns(lambda out: (out, None, "name", out.sum(1))), of_first),
    **{
        f"{way} checkpoint, reentrant {reentrant}": (made, squares)
        for reentrant in (True, False)
        for way, made in {
            "outer": lambda reentrant=reentrant: Checkpointed(reentrant),
            "inner": lambda reentrant=reentrant: Blocks(lambda: InnerCheckpoint(reentrant)),
        }.items()
    },
    "one block four times": (lambda: _with_one_block(Blocks()), squares),
    "one layer": (lambda: nn.Linear(6, 3), squares),
}
QUICK = {
    "like those of transformers",
    "fills zeros",
    "changes its input",
    "within no_grad",
    "inner checkpoint, reentrant True",
}


def _with_one_block(model: Blocks) -> Blocks:
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)
    return model


@pytest.mark.parametrize(
    "forward", [name if name in QUICK else pytest.param(name, marks=slow) for name in FORWARDS]
)
def test_odd_forwards_train_as_in_one_process(forward: str) -> None:
    made, loss_fn = FORWARDS[forward]
    assert_as_one_process(made(), ranks=3, loss_fn=loss_fn)


def _two_losses(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    output = model(x)
    (loss_fn(output, y) * 3 + 2 * loss_fn(output, y * 2)).backward()


def _two_calls(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    first, second = loss_fn(model(x), y), loss_fn(model(x * 2), y)
    second.backward()
    first.backward()


def _evaluated_between(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    loss = loss_fn(model(x), y)
    with torch.no_grad():
        loss_fn(model.eval()(x * 3), y)
    model.train()
    loss.backward()


def _dropped(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    model(x)
    loss_fn(model(x + 1), y)
    loss_fn(model(x * 2), y).backward()


def _with_penalty(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    (loss_fn(model(x), y) + 0.01 * penalty).backward()


@pytest.mark.parametrize(
    "step",
    [
        _two_losses,
        *(
            pytest.param(each, marks=slow)
            for each in (_two_calls, _evaluated_between, _dropped, _with_penalty)
        ),
    ],
)
def test_odd_loops_train_as_one_process(step: Callable[..., None]) -> None:
    assert_as_one_process(Blocks(), step)


def test_rows_that_change_from_step_to_step() -> None:
    rows = [(4, 4, 4), (3, 1, 4), (1, 4, 2), (0, 2, 2), (2, 0, 0)]
    assert_as_one_process(Blocks(), ranks=3, rows=rows)


def test_buffers_that_count_calls_count_each_once() -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[int]:
        for step in range(3):
            a_step(model, loss_fn, *batch(rank, step))
        state = model.state_dict()
        return [int(value) for value in state.values() if value.dtype == torch.long]

    assert piped(Counts(), loop, ranks=3) == [[3] * 5] * 3


def test_copies_are_ordinary_models() -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        a_step(model, loss_fn, *batch(rank))
        x = batch(rank)[0]
        with torch.no_grad():
            expected = model(x) + 0
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert (type(copied), type(copied.first)) == (Blocks, nn.Linear)
                assert torch.allclose(copied(x), expected, rtol=0, atol=1e-12)

    piped(Blocks(), loop)


def test_parts_of_a_model_are_called_by_all_ranks() -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> Tensor:
        with torch.no_grad():
            return model.head(model.body(model.first(batch(0)[0])))  # type: ignore[no-any-return]

    model = Blocks().double()
    for output in piped(model, loop):
        assert torch.allclose(output, model(batch(0)[0]), rtol=0, atol=1e-12)


@slow
def test_compiled_blocks() -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        for block in model.blocks:
            block.compile(backend="eager")
        for step in range(2):
            a_step(model, loss_fn, *batch(rank, step))

    piped(Blocks(), loop)


@slow
def test_backward_hooks_run_where_the_layer_is() -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> list[str]:
        seen: list[str] = []
        for name, module in model.blocks.named_children():
            module.register_full_backward_hook(lambda *_, name=name: seen.append(name))
        a_step(model, loss_fn, *batch(rank))
        return seen

    first, second = piped(Blocks(), loop)
    assert not {*first} & {*second}
    assert sorted([*first, *second]) == sorted("01230123")  # once a micro-batch


def _with_a_head(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    head = torch.linspace(-1, 1, CLASSES * CLASSES).view(CLASSES, CLASSES).double()
    squares(model(x) @ head.requires_grad_(), y).backward()


def _in_place(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    output = model(x)
    output /= 2
    squares(output, y).backward()


def _by_argument_in_place(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    output = model(x)
    nn.functional.relu(output, inplace=True)
    squares(output, y).backward()


def _of_unlike_rows(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    more = model(torch.cat([x, x[: len(x) // 2]]) if x[0, 0] > 0 else x)
    squares(model(x).mean(0), more.mean(0)).backward()


def _twice(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    loss = loss_fn(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def _of_input(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    a_step(model, loss_fn, x.requires_grad_(), y)


def _of_parameters(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))


class _Held:
    """An object with tensors, such as a cache of keys and values."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensors = [tensor]

    def sum(self, *_: Any) -> Tensor:
        return self.tensors[0]


def _in_an_object(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    squares(model(_Held(x)), y).backward()


def _kept(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    (loss_fn(model(x), y) + model.map.mean()).backward()


def _hooked(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    model.register_full_backward_hook(lambda *_: None)
    a_step(model, loss_fn, x, y)


def _at_random(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    squares(nn.functional.dropout(model(x)), y).backward()


SERVED = (_with_a_head, _in_place, _by_argument_in_place, _twice, _of_input)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("step", [*SERVED, pytest.param(_hooked, marks=slow)])
def test_what_needs_the_values_of_an_output_trains_as_in_one_process(
    step: Callable[..., None],
) -> None:
    assert_as_one_process(Blocks(), step, ranks=3, rows=[(3, 1, 4), (1, 4, 2), (0, 2, 2)])


def _hooked_now_and_then(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    hook = model.head.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    a_step(model, loss_fn, x, y)
    hook.remove()
    a_step(model, loss_fn, x, y)


def test_pre_hooks_that_come_and_go_move_no_cut() -> None:
    """A hook's function would be another event in the call of the layer that begins a station."""
    ranks = dict.fromkeys(("first", "blocks.0", "blocks.1", "blocks.2", "blocks.3"), 0)
    assert_as_one_process(Blocks(), _hooked_now_and_then, pins=pins_of({**ranks, "head": 1}))


def test_random_numbers_drawn_for_an_output_are_a_ranks_own() -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        _at_random(model, loss_fn, *batch(rank))
        assert all(p.grad is not None for p in model.parameters())

    piped(Blocks(), loop)


@pytest.mark.parametrize(
    ("made", "step", "said"),
    [
        (KeepsMap, _kept, "forward has kept belongs to another rank"),
        (SkipsInTurn, a_step, "another way than it went for the sample"),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                (Blocks, _in_an_object, "an argument of the model is an object with tensors"),
                (Blocks, _of_unlike_rows, "two calls of the model that have unlike rows"),
                (Blocks, _of_parameters, "torch.autograd.grad with respect to parameters"),
            )
        ),
    ],
)
def test_what_cannot_be_right_is_refused(
    made: Callable[[], nn.Module], step: Callable[..., None], said: str
) -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        for number in range(4):
            step(model, loss_fn, *batch(rank, number))

    errors = errors_of(made(), loop)
    own = [error for error in errors.values() if isinstance(error, UsageError | PlanError)]
    assert own
    assert all(isinstance(error, ShoalError) for error in errors.values())
    with pytest.raises(ShoalError, match=said):
        raise own[0]


HALVES = {"first": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}


@pytest.mark.parametrize(
    ("skips", "head"),
    [
        ([[{0, 1}], [{2, 3}]], True),  # rank 1 would run blocks of rank 0, by the cut of rank 0
        ([[set(), {2, 3}]] * 2, False),  # rank 0 would never come to its cut
        ([[set(), set(), {2, 3}], [set(), {2, 3}]], False),  # nor rank 1, in a later replay
    ],
)
def test_ways_that_differ_are_refused(skips: list[list[set[int]]], head: bool) -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        model.skips = [*skips[rank]]
        output = model(batch(rank)[0])
        output.pow(2).mean().backward()

    pins = pins_of({**HALVES, "head": 1} if head else HALVES)
    sample = {} if head else {"sample": (batch(0)[0], batch(0)[0])}
    errors = errors_of(Skips(head=head), loop, pins=pins, **sample)
    assert all(isinstance(error, ShoalError) for error in errors.values()), errors
    assert any("another way than it went for the sample" in str(e) for e in errors.values())


def test_a_cut_that_cannot_be_is_refused_and_the_planner_finds_another() -> None:
    ranks = {f"blocks.{number}": number % 2 for number in range(4)}
    with pytest.raises(PlanError, match="another rank has a view"):
        piped(PartsViews(), lambda *_: None, pins=pins_of({"first": 1, **ranks, "head": 0}))
    assert_as_one_process(PartsViews())


@pytest.mark.parametrize("look", [lambda x: x.sum() > 0, lambda x: x.sum().item()])
def test_a_forward_that_looks_is_refused_at_once(look: Callable[[Tensor], Any]) -> None:
    reason = r"cannot be given to ranks.*looks at values that another rank has"
    with pytest.raises(PlanError, match=reason):
        piped(Looks(look), lambda *_: None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pins": {"first": "pipeline"}}, "all layers of a model, or none"),
        ({"pins": {**PINS, "head": "replicate"}}, "all layers of a model, or none"),
        ({"pins": {**PINS, "first": "pipeline:1"}}, "some layers of the pipeline name a rank"),
        ({"pins": {"*": "pipeline:5"}}, "a rank that there is not"),
        ({"pins": {"*": "pipeline:one"}}, 'write for instance "pipeline:0"'),
        ({"update_every": {"*": 2}}, "update period"),
        ({"local_steps": 4}, "local steps"),
        ({"replan": True}, "leave out replan, or the pipeline"),
        ({"sync_batchnorm": True}, "a pipeline takes the rows of one rank after"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any], said: str) -> None:
    model = Counts() if "sync_batchnorm" in options else Blocks()
    with pytest.raises(PlanError, match=said):
        piped(model, lambda *_: None, **options)


def test_strategies_may_list_nothing_but_the_pipeline() -> None:
    assert_as_one_process(Blocks(), pins=None, strategies=["pipeline"])


@slow
@pytest.mark.parametrize(
    "options",
    [{"codecs": "all"}, {"max_error": 0.1}, {"check_every": 2}, {"memory": "low"}],
)
def test_options_that_change_nothing(options: dict[str, Any]) -> None:
    assert_as_one_process(Blocks(), **options)


@slow
@pytest.mark.parametrize(
    "ranks",
    [
        {"first": 1, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1, "blocks.3": 1, "head": 1},
        {"first": 0, "blocks.0": 1, "blocks.1": 0, "blocks.2": 1, "blocks.3": 0, "head": 1},
        {"first": 1, "blocks.0": 2, "blocks.1": 0, "blocks.2": 0, "blocks.3": 2, "head": 1},
    ],
)
def test_any_rank_may_hold_any_layer(ranks: dict[str, int]) -> None:
    assert_as_one_process(Blocks(), ranks=3, pins=pins_of(ranks))


def test_a_plan_is_saved_followed_again_and_explained(tmp_path: Any) -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        a_step(model, loss_fn, *batch(rank))
        plan = shoal.plan_of(model)
        assert plan is not None
        assert plan.predicted_s > 0
        if rank == 0:
            plan.save(tmp_path / "plan.json")
        explained = shoal.explain(model)
        assert "predicted step" in explained
        assert "stations, in the order of forward" in explained
        assert "replicate:allreduce for all layers would take" in explained
        shoal.unparallelize(model)

    model = Blocks()
    piped(model, loop)
    assert_as_one_process(model, pins=None, plan=tmp_path / "plan.json")


def test_ranks_without_layers_are_named() -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        explained = shoal.explain(model)
        assert "this plan has nothing to do for rank 2" in explained

    ranks = {"first": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 1, "head": 1}
    piped(Blocks(), loop, ranks=3, pins=pins_of(ranks))


def test_clipping_that_brings_all_gradients_says_so() -> None:
    def loop(rank: int, model: Any, loss_fn: Any, optimizer: Any) -> None:
        x, y = batch(rank)
        loss_fn(model(x), y).backward()
        optimizer.clip_grad_norm_(1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with pytest.warns(UserWarning, match=r"optimizer.clip_grad_norm_.*sends one number") as told:
        piped(Blocks(), loop)
    assert {Path(each.filename).name for each in told} == {Path(__file__).name}
