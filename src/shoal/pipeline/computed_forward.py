"""A forward of all ranks that has been computed: its output, its losses, and their gradients.

The rank that holds the end of the model has the outputs. It computes the loss of each rank's rows,
and tells each rank its own. In backward each rank tells it the gradient of that loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor

from shoal.core.errors import RanksDiffer, UsageError
from shoal.pipeline.absent_tensors import Absent
from shoal.pipeline.alone_output import MODEL, EndPart, LocalResults, ReadsHere, is_number
from shoal.pipeline.calls import ModelCall, Shape, number_of
from shoal.pipeline.crossings import EndLoss
from shoal.pipeline.expressions import (
    EndResult,
    Expression,
    Unclear,
    described,
    forms_of,
    in_order,
    with_constants,
    without_constants,
)
from shoal.pipeline.guide import Telling, place
from shoal.pipeline.kept_numbers import WithKept
from shoal.pipeline.model import (
    BACKWARD,
    GATHERING,
    LOSS,
    READING,
)
from shoal.pipeline.moving_buffers import Counters, aside
from shoal.pipeline.output import EndOutput, looked, made_of, note_use, way_back
from shoal.pipeline.replay import Replay
from shoal.pipeline.route import Coming
from shoal.pipeline.run import ForwardRun
from shoal.pipeline.told_functions import check_told
from shoal.pipeline.trees import look_into_dataclasses, mapped, tensors_in
from shoal.pipeline.walk import walking


@final
class EndedForward:
    """One forward of all ranks, with its outputs.

    Args:
        run: the forward.
    """

    def __init__(self, run: ForwardRun) -> None:
        self.run = run
        self._num_computed = 0  # expressions that the end has computed
        self.is_alone = False
        # its own output, by a reference that makes no circle, and whether tensors take a gradient
        self._ended: Callable[[], Expression | None] = lambda: None
        self._takes_grad: Sequence[bool] = ()
        self._part: EndPart | None = None  # None if ranks cannot read it alone

    def output(self) -> WithKept:
        """Return the output of this rank's rows: the end has its values, and numbers are told."""
        form, ended, takes_grad = self._ended_forms()
        self._share(ended, takes_grad)
        count = 0

        def placed(leaf: Any) -> Any:
            nonlocal count
            if not isinstance(leaf, Tensor):
                return leaf
            index, count = count, count + 1
            grad = takes_grad[index]
            end = EndOutput.of(ended, index, _form(leaf), takes_grad=grad)
            if is_number(leaf):
                return self.told_number(end.result, grad)
            return end

        placed_form: WithKept = mapped(placed, form)
        return placed_form

    def _ended_forms(self) -> tuple[WithKept, Expression, list[bool]]:
        """Return the output's form, its expression, and whether its tensors take a gradient."""
        number, outputs = self.run.told.numbers[self.run.own], self.run.route.output
        if number not in outputs:
            outputs[number] = self._form_of_output()
        # a form for other shapes knows neither gradients nor the numbers that this call keeps
        recorded = next(iter(outputs.values()))
        form = WithKept(outputs[number].output, recorded.kept)
        takes_grad = [self.run.grad and leaf.requires_grad for leaf in tensors_in(recorded)]
        ended = Expression((self,), None, forms=[_form(leaf) for leaf in tensors_in(form)])
        ended.of_ranks = {
            rank: tensors_in((output, [kept[place] for place in recorded.kept]))
            for rank, (output, kept) in sorted(self.run.outputs.items())
        }
        return form, ended, takes_grad

    def held(self) -> tuple[Expression, list[tuple[int, bool]]]:
        """Return the output on a host without rows, and numbers of results that ranks are told.

        Each stands with the fact whether a gradient may come back.
        """
        form, ended, takes_grad = self._ended_forms()
        forms = [_form(leaf) for leaf in tensors_in(form)]
        return ended, [(n, takes_grad[n]) for n, each in enumerate(forms) if is_number(each)]

    def _form_of_output(self) -> Any:
        pipeline = self.run.pipeline
        replay = Replay(self.run.route.record, None, pipeline.forms, pipeline.modules, lambda _: ())
        absent = [pipeline.forms.like(tensor) for tensor in self.run.call.tensors]
        tensors = [
            tensor if number in self.run.route.record.looked_at else absent[number]
            for number, tensor in enumerate(self.run.call.tensors)
        ]
        args, kwargs = self.run.call.with_tensors(tensors)
        counters = Counters(self.run.route.record.countings)
        with walking(), aside([*pipeline.homes.moving.values()]):
            output = replay.run(self.run.forward, args, kwargs)
        counters.put_back()
        return output

    def forms_of(self, function: Callable[..., Any], arguments: Any) -> Any:
        """Return a function's results, with forms in the places of tensors."""
        return forms_of(self.run.pipeline.forms, function, arguments)

    def check_together(self, forwards: Sequence[EndedForward]) -> None:
        """Check that one function may take the outputs of these forwards, of which this is one.

        Raises:
            UsageError: ranks have unlike shares of the rows in these calls.
            Unclear: the outputs are of several models.
        """
        ends = {(id(each.run.pipeline), each.run.route.end) for each in forwards}
        if len(ends) > 1:
            raise Unclear
        weights = {
            id(each.run.weight_of) for each in forwards
        }  # one if they are called in one function
        if len(weights) > 1 and len({tuple(each.run.rows) for each in forwards}) > 1:
            raise UsageError(
                "a loss takes the outputs of two calls of the model that have unlike rows",
                got=" and ".join(str(each.run.rows) for each in forwards) + " rows of the ranks",
                do="compute a loss of each call and add these; or give parallelize a compute_loss "
                "that makes both calls",
            )

    def check_told(self, expression: Expression) -> None:
        """Raise Unclear if the end is on a host that cannot be told of a function."""
        pipeline = self.run.pipeline
        if pipeline.guide is None or self.run.route.end in pipeline.bringing:
            return
        if len(expression.forwards) > 1:
            raise Unclear
        check_told(expression)

    def result(self, tensor: Tensor) -> EndResult | None:
        """Return the result that a number is, if it was told of this forward."""
        node: Any = tensor.grad_fn
        while type(node).__name__ == _BORDER:  # the border changes no value
            node = node.next_functions[0][0]
        return node.result if getattr(node, "run", None) is self else None

    def loss(self, loss_fn: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """Return the loss of this rank's rows, which the end computes (a collective)."""
        look_into_dataclasses((args, kwargs))
        given = [leaf for leaf in tensors_in((args, kwargs)) if isinstance(leaf, EndOutput)]
        note_use(given)
        try:
            expression = made_of(given, loss_fn, (tuple(args), kwargs), is_loss=True)
        except Unclear:  # something else takes a gradient here: each rank computes its own loss
            args, kwargs = mapped(looked, (tuple(args), kwargs))
            loss: Tensor = loss_fn(*args, **kwargs)
            return loss
        result, grad = EndResult(expression, 0), torch.is_grad_enabled()

        def told() -> Tensor:
            return _cross(self.told_number(result, grad), given)

        try:
            telling = [(result, True, grad)]
            number: Tensor = self._together(telling, LOSS, told, loss=expression)
            return number
        except ReadsHere as here:
            local = self._local(here)
            args, kwargs = mapped(
                lambda leaf: local.of(leaf.result) if _is_output(leaf) else leaf, (args, kwargs)
            )
            loss = loss_fn(*args, **kwargs)
            return loss if here.is_alone else _cross(loss, given)

    def told(self, outputs: Sequence[EndOutput]) -> list[Tensor]:
        """Compute outputs where the end is, and return them for this rank's rows (a collective)."""
        purpose = LOSS if any(each.takes_grad for each in outputs) else READING
        results = [each.result for each in outputs]
        telling = [(each.result, is_number(each.form), each.takes_grad) for each in outputs]
        try:
            values: list[Tensor] = self._together(telling, purpose, lambda: self._values(outputs))
            return values
        except ReadsHere as here:
            local = self._local(here)
            values = [local.of(result) for result in results]
            if here.is_alone:
                return values
            return [_cross(v, [each]) for v, each in zip(values, outputs, strict=True)]

    def _values(self, outputs: Sequence[EndOutput]) -> list[Tensor]:
        """Bring each rank the values of its own rows, which the end has computed (a collective)."""
        values = []
        for each in outputs:
            if not is_number(each.form):
                value = self.told_values(each.result, each.form, grad=each.takes_grad)
                values.append(_cross(value, [each]) if each.takes_grad else value)
            else:
                values.append(_cross(self.told_number(each.result, each.takes_grad), [each]))
        return values

    def _together(
        self,
        telling: Sequence[Telling],
        purpose: str,
        told: Callable[[], Any],
        *,
        loss: Expression | None = None,
    ) -> Any:
        """Compute results for each rank's rows, where the end is, and tell them (a collective).

        Raises:
            ReadsHere: this rank computes them by itself.
        """
        self.is_alone, part = False, self._part
        if part is not None and part.gathered is not None:
            raise ReadsHere(part.gathered, is_alone=False)
        results = [result for result, *_ in telling]
        order = in_order([each.expression for each in results])
        arguments, constants = without_constants(
            [each.arguments for each in order], self.run.device
        )
        modes = {
            "functions": described(order, results),
            "with gradients": torch.is_grad_enabled(),
        }
        call = ModelCall((arguments, constants), {}, modes)
        try:
            self._compute(order, call, purpose, loss, telling)
        except ReadsHere as here:
            noted = part.noted(call) if part is not None and here.is_alone else None
            if noted is not None:
                return noted
            self.is_alone = here.is_alone
            raise
        made = told()
        if part is not None and purpose == LOSS and torch.is_grad_enabled():
            part.readings.append((call, made))
        return made

    def _meet(self, purpose: str, numbers: Sequence[int]) -> Sequence[int]:
        """Tell every rank a number before all read the output, and return theirs."""
        comm = self.run.comm
        trains = purpose.startswith(LOSS) and torch.is_grad_enabled()
        if comm.attendance is None or self._part is None:
            guide = self.run.pipeline.guide
            return (comm if guide is None else guide.trainers).numbers(numbers, purpose)
        reading = comm.attendance.read(self._part, purpose, numbers, trains=trains)
        if reading.told is not None:
            comm.journal.begins(purpose)
            return reading.told
        if reading.values is not None:
            raise ReadsHere(self._part.named(reading.values, purpose * trains), is_alone=True)
        self._part.gathered = self._gather(self._part)
        raise ReadsHere(self._part.gathered, is_alone=False)

    def _share(self, ended: Expression, takes_grad: Sequence[bool]) -> None:
        """Give the output to ranks that read it alone, until the model is called again."""
        comm = self.run.comm
        self._ended, self._takes_grad = ref(ended), takes_grad
        if comm.attendance is not None:
            key, end = comm.attendance.output_key(MODEL), self.run.route.end
            self._part = EndPart(key, comm, end, ended, self.run.device)
            comm.attendance.share(self._part)
            comm.attendance.hold(self._part)

    def _gather(self, part: EndPart) -> Mapping[int, Tensor]:
        """Bring each rank the values of its own rows, with their gradients (a collective)."""
        self.run.comm.journal.begins(GATHERING)
        gathered, ended = {}, self._ended()
        assert ended is not None
        with torch.enable_grad():
            for number in part.numbers:
                result, grad = EndResult(ended, number), self._takes_grad[number]
                gathered[number] = self.told_values(result, ended.forms[number], grad=grad)
        return gathered

    def _local(self, here: ReadsHere) -> LocalResults:
        """Return results that this rank computes by itself."""

        def read(other: EndedForward) -> Mapping[int, Tensor]:
            """Read the output of another forward, which the same function takes."""
            if other._part is None or not here.is_alone:
                raise RanksDiffer(
                    "ranks read the outputs of several calls of the model in unlike ways",
                    do="make the same calls with these outputs on every rank",
                )
            attendance = self.run.comm.attendance
            assert attendance is not None
            purpose = f"reading of {other._part}, beside another one"
            numbers = [0] * self.run.comm.size
            reading = attendance.read(other._part, purpose, numbers, trains=False)
            assert reading.values is not None
            trains = any(value.requires_grad for value in here.values.values())
            return other._part.named(reading.values, purpose * trains)

        ended = self._ended()
        return LocalResults(read, {} if ended is None else {ended: here.values})

    def _compute(
        self,
        order: Sequence[Expression],
        call: ModelCall,
        purpose: str,
        loss: Expression | None,
        telling: Sequence[Telling],
    ) -> None:
        """Compute expressions for each rank's rows, where the end is (a collective)."""
        comm, pipeline, end = self.run.comm, self.run.pipeline, self.run.route.end
        comm.reached(purpose)
        # ranks that call the same functions with other arguments read in unlike ways
        words = f"{call.modes['functions']} ({number_of(call.common) & 0xFFFFFFFF:08x})"
        meeting = f"{purpose}, {words}: {self._part}"
        shapes = pipeline.tell(call, purpose, partial(self._meet, meeting))[0]
        if pipeline.guide is not None and end not in pipeline.bringing:
            numbers = {each: self._num_computed + place for place, each in enumerate(order)}
            pipeline.guide.computes(self.run, numbers, call, shapes, telling)
        comm.journal.begins(purpose)
        if comm.rank == end:
            self.compute_all(order, call, shapes, loss=loss)
        else:
            for tensor in call.tensors:
                pipeline.outbox.send(tensor, end)
        self.computed(order)

    def computed(self, order: Sequence[Expression]) -> None:
        """Note that the end has computed these expressions."""
        for each in order:
            each.computed(self._num_computed)
            self._num_computed += 1

    def compute_all(
        self,
        order: Sequence[Expression],
        call: ModelCall,
        shapes: Sequence[Sequence[Shape]],
        *,
        loss: Expression | None,
    ) -> None:
        """Compute expressions for each rank's rows, with that rank's tensors."""
        comm = self.run.comm
        bringing = self.run.pipeline.bringing
        coming = {
            rank: Coming(comm, rank, shapes[rank], self.run.device)
            for rank in comm.others
            if rank in bringing
        }
        for rank in bringing:
            tensors = call.tensors if rank == comm.rank else coming[rank].wait()
            (arguments, constants), _ = call.with_tensors(tensors)
            for each, (args, kwargs) in zip(
                order, with_constants(arguments, constants), strict=True
            ):
                output = each.compute(rank, args, kwargs)
                if each is loss:
                    _check_loss(output)

    def told_number(self, result: EndResult, grad: bool) -> Tensor:
        """Bring each rank the number of its own rows (a collective)."""
        comm, end, bringing = self.run.comm, self.run.route.end, self.run.pipeline.bringing
        numbers = {
            rank: tensors[result.number]
            for rank, tensors in sorted(result.expression.of_ranks.items())
        }
        value = torch.zeros((), dtype=torch.float64, device=self.run.device)
        if comm.rank == end:
            for rank in comm.others:
                if rank in bringing:
                    self.run.pipeline.outbox.send(_with_kind(numbers[rank]), rank)
            value = numbers.get(comm.rank, numbers[0]).detach()
        elif comm.rank in bringing:
            kind = torch.zeros(2, dtype=torch.float64, device=self.run.device)
            comm.finish([comm.receive(kind, end)])
            value = kind[0].to(_DTYPES[int(kind[1])])
        result.expression.told[result.number] = value.clone()
        return self._with_gradient(result, value) if grad else value.clone()

    def _with_gradient(self, result: EndResult, value: Tensor) -> Tensor:
        """Return a result for this rank's rows. Its backward is that of all ranks."""
        numbers = [
            of_rank[result.number] for _, of_rank in sorted(result.expression.of_ranks.items())
        ]
        pipeline = self.run.pipeline
        parts = [p for p in pipeline.elsewhere if p.requires_grad and pipeline.guide is None]
        runs = [forward.run for forward in result.expression.forwards]
        with torch._C.DisableTorchFunctionSubclass():
            number: Tensor = EndLoss.apply(  # type: ignore[no-untyped-call]
                self,
                result,
                value,
                len(numbers),
                len(parts),
                *numbers,
                *parts,
                *(token for run in runs for token in run.gate.tensors),
                self.run.pipeline.anchor,
            )
        return number

    def told_values(self, result: EndResult, form: Tensor, *, grad: bool) -> Tensor:
        """Bring each rank the values of its own rows (a collective)."""
        comm, end, bringing = self.run.comm, self.run.route.end, self.run.pipeline.bringing
        if comm.rank != end:
            shape = tuple(form.shape), form.dtype
            value = Coming(comm, end, [shape], self.run.device).wait()[0]
            return self._with_gradient(result, value) if grad else value
        of_ranks = result.expression.of_ranks
        for rank in comm.others:
            if rank in bringing:
                self.run.pipeline.outbox.send(of_ranks[rank][result.number], rank)
        value = of_ranks.get(comm.rank, of_ranks[0])[result.number].detach()
        return self._with_gradient(result, value) if grad else value

    def slopes(self, result: EndResult, grad: Tensor, forms: Sequence[Any]) -> Sequence[Tensor]:
        """Tell the end the gradient of this rank's result, weighed; the end returns all."""
        comm, end, pipeline = self.run.comm, self.run.route.end, self.run.pipeline
        self.run.gate.note(place(result))
        comm.journal.begins(BACKWARD)
        kind = grad.dtype if grad.dim() else torch.float64
        slopes: dict[int, Tensor] = {}
        if comm.rank in pipeline.bringing:
            weight = pipeline.weighs(self.run.weight_of)
            own = grad.detach().to(kind) / len(pipeline.bringing)
            slopes[comm.rank] = own if weight is None else own * weight
        if comm.rank != end:
            for own in slopes.values():
                pipeline.outbox.send(own, end)
            return ()
        coming = {
            rank: Coming(comm, rank, [(forms[rank][2], kind)], self.run.device)
            for rank in comm.others
            if rank in pipeline.bringing
        }
        slopes |= {rank: each.wait()[0] for rank, each in coming.items()}
        return [slopes[rank].to(grad.dtype) for rank in pipeline.bringing]


def _with_kind(number: Tensor) -> Tensor:
    """Return a number and its type as a message."""
    told = number.detach().to(torch.float64).reshape(1)
    code = torch.tensor([_DTYPES.index(number.dtype)], dtype=torch.float64, device=told.device)
    return torch.cat([told, code])


def _cross(loss: Tensor, given: Sequence[EndOutput]) -> Tensor:
    after = way_back(given)
    return after(loss) if after is not None and loss.requires_grad else loss


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            "a loss of a pipeline's output is one number",
            got=f"{type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}",
            do='take its mean: reduction="mean"',
        )


def _is_output(leaf: Any) -> bool:
    return isinstance(leaf, EndOutput)


def _form(leaf: Tensor) -> Tensor:
    return leaf.slot.form if isinstance(leaf, Absent) else leaf


_BORDER = "_IdentityBackward"  # nodes of the model's border
_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
