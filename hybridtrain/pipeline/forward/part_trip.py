"""A trip where other processes have some of the stages.

    process 0      | layer 0  | code | (left)
    process 1      | stand-in | code | layer 1  | code | (left)
    process 2      | stand-in | code | stand-in | code | layer 2 | loss |

The forward is the user's, and runs in every process. A layer of another process is answered with
what it has returned in the rehearsal, as fake tensors, which have a format and no values. In the
stages of other processes, code between layers runs on fake tensors; in a stage of this one, a fake
tensor stands for the value that has arrived under its number. What depends on integer inputs alone
is real in all processes. After the last stage of this process, the forward is left.

An operation that no mode sees, such as one in C++, raises if it gets a fake tensor, and code that
takes a number out of a value is refused in the rehearsal: nothing is computed with values that are
missing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from hybridtrain._base.skip import pop, stash
from hybridtrain._base.tensors import version_of
from hybridtrain._base.torch_private import (
    FakeTensor,
    FakeTensorMode,
    next_node_number,
    pop_function_mode,
    push_function_mode,
)
from hybridtrain._base.values import leaves_of
from hybridtrain.errors import SplitError, setting
from hybridtrain.graph import Layer
from hybridtrain.partitioning import copy_of
from hybridtrain.pipeline.autograd_graph import edge_of
from hybridtrain.pipeline.engine import HeadOutput
from hybridtrain.pipeline.forward.glue import DESCRIBING, DEVICE, PLAIN, Cut, CutValue, Glue
from hybridtrain.pipeline.forward.layer_formulas import Answer
from hybridtrain.pipeline.forward.rehearsal import (
    InputElsewhere,
    Number,
    Rehearsal,
    Uses,
    ValueFormat,
    fake_of,
)
from hybridtrain.pipeline.forward.trip import StageInFlight, Trip
from hybridtrain.pipeline.forward.values import Model

if TYPE_CHECKING:
    from hybridtrain.pipeline.autograd_graph import Root
    from hybridtrain.pipeline.forward.places import LayerPlace


_NONE: AbstractContextManager[Any] = nullcontext()


class Left(BaseException):
    """Leaves a forward after the last stage of this process.

    A BaseException, because an `except Exception` in a model's forward must not catch it.
    """


def is_of_first_stage(leaf: Any) -> bool:
    """Returns whether an input of the forward is a value of the first stage: floating-point ones.

    Integers and booleans, such as tokens and masks, are real in all processes, because code between
    layers may depend on them.
    """
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def is_elsewhere(leaf: Any) -> bool:
    """Returns whether an input of the forward is one that only the first process has."""
    return isinstance(leaf, InputElsewhere)


class NumberingGlue(Glue):
    """Gives operations between layers what the stage has of their arguments, and numbers results.

    See `NumberedTrip`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        trip = self._trip
        # A stand-in tells its device too: that of this process.
        if trip is None or self.is_off or func in DESCRIBING or func is DEVICE:
            return func(*args, **kwargs or {})
        assert isinstance(trip, NumberedTrip)
        self.is_off = True
        try:
            return trip.operation(func, args, kwargs or {})
        finally:
            self.is_off = False


class NumberedTrip(Trip):
    """A forward whose values have numbers, the same ones in all processes.

    Args:
        mode: the mode of its fake tensors.
        model, microbatch, draws, enter_stage, leave_stage, trains: as for a `Trip`.

    Attributes:
        events: the number of events so far: calls of layers and operations between layers, if they
            return tensors.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        model: Model,
        microbatch: int,
        draws: Any,
        enter_stage: Callable[[int, int], None],
        leave_stage: Callable[[int, int], None],
        trains: bool,
    ) -> None:
        super().__init__(
            model, microbatch, draws, enter_stage, leave_stage, trains, hold=False, learns=False
        )
        self.glue = NumberingGlue(self)
        self.events = 0
        self._mode = mode
        # by the `id` of a tensor: its number, the stage that made it, and the tensor
        self._numbers: dict[int, tuple[Number, int, Tensor]] = {}
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # of tensors that have values

    @property
    def looks_in_functions(self) -> bool:
        """Whether custom autograd functions, which modes do not see, are looked at."""
        return self.is_in_forward and self.layer is None and not self.glue.is_off

    def note_own(self, *values: Any) -> None:
        """See `StageValues`; an input that only the first process has is of no stage here."""
        super().note_own(*[value for value in values if not is_elsewhere(value)])

    def numbered_inputs(self, arguments: Any) -> Any:
        """Returns the arguments of the forward; floating-point ones are values of the first stage.

        See `is_of_first_stage`.
        """
        args, kwargs = arguments
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor | InputElsewhere):
            return ((self._numbered(args[0], 0),), kwargs)  # most often
        leaves, spec = tree_flatten(arguments, is_leaf=is_elsewhere)
        return tree_unflatten([self._numbered(leaf, n) for n, leaf in enumerate(leaves)], spec)

    def _numbered(self, leaf: Any, place: int) -> Any:
        if isinstance(leaf, InputElsewhere) or is_of_first_stage(leaf):
            return self._input(leaf, (0, place))
        return leaf

    def _input(self, value: Tensor | InputElsewhere, number: Number) -> Tensor:
        """Returns what the forward gets as an input of the first stage: here, a fake tensor."""
        form = value.form if isinstance(value, InputElsewhere) else ValueFormat.of(value)
        fake = fake_of(form, self._mode, self._model.devices[0])
        self._numbers[id(fake)] = number, 0, fake
        return fake

    def note(self, values: Any, replaced: dict[int, Tensor]) -> None:
        """Numbers the results of an event.

        Args:
            values: a pytree.
            replaced: what the event got in the place of tensors, by its `id`: a tensor that the
                event changes and returns has a new number under its own name, too.
        """
        if isinstance(values, Tensor):
            tensors = [values]
        elif type(values) in PLAIN:
            return
        else:
            tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        # A fake tensor answers questions about itself without a mode, so these are no events.
        self.events += bool(tensors)
        for place, tensor in enumerate(tensors):
            number = (self.events, place)
            self._number(tensor, number)
            if id(tensor) in self._numbers and id(tensor) in replaced:
                original = replaced[id(tensor)]
                self._numbers[id(original)] = number, self.stage, original

    def _number(self, tensor: Tensor, number: Number) -> None:
        """Gives a tensor its number, if the trip will need it."""
        raise NotImplementedError

    def _taken(self, tensor: Tensor) -> Tensor:
        """Returns what the present stage has in the place of a tensor."""
        raise NotImplementedError

    def _fake(self, tensor: Tensor) -> Tensor:
        """Returns a tensor without values in the place of one that has values."""
        if isinstance(tensor, FakeTensor):
            return tensor
        pair = self._fakes.get(id(tensor))
        if pair is None:
            fake = fake_of(ValueFormat.of(tensor), self._mode, self._model.devices[0])
            pair = self._fakes[id(tensor)] = tensor, fake
            if id(tensor) in self._numbers:
                number, home, _ = self._numbers[id(tensor)]
                self._numbers[id(fake)] = number, home, fake
        return pair[1]

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operation between layers."""
        if self._are_own(args) and (not kwargs or self._are_own(kwargs.values())):
            result = func(*args, **kwargs)
            self.note(result, {})
            return result
        (args, kwargs), replaced, is_fake = self._arguments_here((args, kwargs))
        result = self.on_fakes(func, args, kwargs) if is_fake else func(*args, **kwargs)
        self.note(result, replaced)
        return result

    def _are_own(self, values: Iterable[Any]) -> bool:
        """Returns whether values are plain ones and tensors that the stage has itself."""
        for value in values:
            if type(value) is Tensor:
                if self._taken(value) is not value:
                    return False
            elif type(value) not in PLAIN:
                return False
        return True

    def on_fakes(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the result of a call on fake tensors; where it needs values, of a call on zeros.

        Some kernels refuse fake tensors, and some code asks for values, as a router of experts
        does. The formats of results hardly ever depend on the values.
        """
        draws = self.draws.counts
        try:
            with self._mode:  # what the call makes on its way is fake, too
                return call(*args, **kwargs)
        except Exception as error:
            self.draws.go_on(draws)
            try:
                result = self._on_zeros(call, args, kwargs)
            except Exception:
                raise error from None
            if any(isinstance(leaf, bool | int | float | complex) for leaf in tree_leaves(result)):
                raise _asks_for_a_number() from None  # which would be that of zeros
            return result

    def _on_zeros(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if isinstance(call, nn.Module):
            call = copy_of(Layer("", call), _zeros)
        real = tree_map_only(Tensor, _zeros, (args, kwargs))
        leaves = zip(tree_leaves(real), tree_leaves((args, kwargs)), strict=True)
        fakes: dict[int, Tensor] = {id(zeros): leaf for zeros, leaf in leaves}

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in fakes:
                form = ValueFormat.of(tensor)
                fakes[id(tensor)] = fake_of(form, self._mode, self._model.devices[0])
            return fakes[id(tensor)]

        return tree_map_only(Tensor, fake, call(*real[0], **real[1]))

    def _arguments_here(self, tree: Any) -> tuple[Any, dict[int, Tensor], bool]:
        """Returns arguments with what the stage has of them; all are fake if one of them is.

        Also returns the tensors that others replace, by the `id` of the others, and whether the
        arguments are fake.
        """
        leaves, spec = tree_flatten(tree)
        values = [self._taken(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if is_fake := any(isinstance(leaf, FakeTensor) for leaf in values):
            values = [self._fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in values]
        replaced = {
            id(value): leaf for leaf, value in zip(leaves, values, strict=True) if value is not leaf
        }
        # otherwise the same objects: a layer may add to a list for its caller
        return tree_unflatten(values, spec) if replaced else tree, replaced, is_fake

    def output_here(self, output: Any) -> Any:
        """Returns the output of the model with what the last stage has of its tensors."""
        if isinstance(output, Tensor):
            return self._taken(output)
        leaves, spec = tree_flatten(output)
        values = [self._taken(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tree_unflatten(values, spec)

    def cut_all(self, tree: Any) -> Any:
        """Returns the arguments of a custom function; it is an event."""
        return self._arguments_here(tree)[0]

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns the tensor where a backward starts."""
        return self._taken(tensor)

    def run_layer(self, place: LayerPlace, args: Any, kwargs: Any) -> Any:
        """Runs a layer, or what stands for it."""
        glue = self.glue
        is_popped = pop_function_mode(glue)
        was_off, glue.is_off = glue.is_off, True
        try:
            if place.stage != self.stage:
                self.enter(place.stage)
            replaced: dict[int, Tensor] = {}
            if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:  # most often
                value = self._taken(args[0])
                if value is not args[0]:
                    replaced[id(value)] = args[0]
                args = (value,)
            else:
                (args, kwargs), replaced, _ = self._arguments_here((args, kwargs))
            if place.pops:
                popped = {name: pop(name) for name in place.pops if name not in place.stashes}
                for name, value in self._arguments_here(popped)[0].items():
                    stash(name, value)
            self.draws.at(place.number, place.unit)
            self.layer = place
            try:
                output = place.runs.run(place.position, self, args, kwargs)
            finally:
                self.layer = None
            self.note((output, self.stashed(place)) if place.stashes else output, replaced)
            return output
        finally:
            glue.is_off = was_off
            if is_popped:
                push_function_mode(glue)

    def stashed(self, place: LayerPlace) -> list[Any]:
        """Returns the values that a layer has stashed for later ones."""
        return [pop(name) for name in place.stashes]

    def device_of(self, tensor: Tensor) -> torch.device:
        """Returns the device of a tensor; a fake one claims the process's."""
        return tensor.device

    def _check_changes(self) -> None:
        """See `Trip`; views of a value that cross are separate, see `RehearsalTrip`."""


class RehearsalTrip(NumberedTrip):
    """A forward of a copy of the model whose parameters are fake.

    Args:
        mode: the mode of the fake tensors.
        model: the copy.
        draws: counts the draws.
        trains: whether a backward follows.

    Attributes:
        rehearsal: what it has found.
    """

    def __init__(self, mode: FakeTensorMode, model: Model, draws: Any, trains: bool) -> None:
        super().__init__(mode, model, 0, draws, _nothing, _nothing, trains)
        self.rehearsal = Rehearsal()
        self.known: dict[Hashable, Answer] = {}  # of layers, see `RehearsedLayers`
        self.lessons: list[Callable[[], None]] = []  # to learn from after the forward
        self._uses = Uses(len(model.devices))
        self._versions: dict[int, int] = {}  # of values, when their stage ended
        self._inputs: list[tuple[Tensor, int]] = []  # and their versions at the end of stage 0
        self._integers: list[Tensor] = []  # inputs that all processes have
        # buffers that no layer has, by name, and their versions at the end of stage 0
        self._buffers: list[tuple[str, Tensor, int]] = []

    def go(self, arguments: tuple[tuple[Any, ...], dict[str, Any]], autocast: Any) -> Rehearsal:
        """Runs the forward."""
        self._note_stage()
        self.run(
            lambda: self.numbered_inputs(arguments),
            self._end_of_stages,
            autocast,
            None,
        )
        self.rehearsal.borders = self._uses.borders()
        return self.rehearsal

    def _end_of_stages(self, output: Any) -> HeadOutput:
        with self.glue.off():
            leaves_of(output)  # registers dataclasses
            self.output_here(output)  # the loss may use any of it
            # Not between layers, where a question is a use: the inputs would cross all borders.
            is_changed = any(version_of(fake) != version for fake, version in self._inputs)
            self._check_integers_and_buffers()
        if self._last and is_changed:
            raise SplitError(
                "a later stage than the first changes an input of the model in place, but with "
                f"{setting('engine', 'distributed')} only the first process has the input: change "
                "a copy (.clone())"
            )
        return HeadOutput(None)

    def _check_integers_and_buffers(self) -> None:
        engine = setting("engine", "distributed")
        if any(self._changes_of_fake(integers) for integers in self._integers):
            raise SplitError(
                f"a layer changes an integer input of the model in place, but with {engine} each "
                "process has its own, and runs its own layers only: change a copy (.clone())"
            )
        for name, buffer, changes in self._buffers:
            if version_of(buffer) + self._changes_of_fake(buffer) != changes:
                raise SplitError(
                    f"code between layers changes the buffer {name!r} after the first stage, but "
                    f"with {engine} only the first process keeps a buffer that no layer has: move "
                    "it into the layer whose output it is computed from, or set "
                    f"{setting('engine', 'local')}"
                )

    def _changes_of_fake(self, tensor: Tensor) -> int:
        """Returns how often the stand-in of a tensor with values has been changed in place."""
        pair = self._fakes.get(id(tensor))
        return 0 if pair is None else version_of(pair[1])

    def _numbered(self, leaf: Any, place: int) -> Any:
        numbered = super()._numbered(leaf, place)
        if isinstance(leaf, Tensor) and numbered is leaf:
            self._integers.append(leaf)
        return numbered

    def run_layer(self, place: LayerPlace, args: Any, kwargs: Any) -> Any:
        """Runs a layer; first registers the dataclasses that it gets, so that trips look inside."""
        leaves_of((args, kwargs))
        return super().run_layer(place, args, kwargs)

    def refuse_draw(self, function: str) -> None:
        """Refuses a draw between layers from a generator of which each process has its own.

        Args:
            function: the function that draws, of Python or NumPy.

        Raises:
            SplitError: the forward is between two layers.
        """
        if self.is_in_forward and self.layer is None:
            raise SplitError(
                f"the forward draws a random number with {function} between layers, but with "
                f"{setting('engine', 'distributed')} each process would draw a different one: draw "
                "it with torch, such as torch.rand(()), which draws the same in all of them, move "
                f"the code into a layer, or use {setting('engine', 'local')}"
            )

    def _note_stage(self) -> None:
        self.rehearsal.events.append(self.events)
        self.rehearsal.draws.append(self.draws.counts)

    def _input(self, value: Tensor | InputElsewhere, number: Number) -> Tensor:
        fake = super()._input(value, number)
        self._inputs.append((fake, 0))
        return fake

    def enter(self, stage: int) -> None:
        """Moves to a later stage."""
        self._check_order(stage)
        while self.stage < stage:
            if not self.stage:
                self._inputs = [(fake, version_of(fake)) for fake, _ in self._inputs]
                self._buffers = [
                    (name, buffer, version_of(buffer) + self._changes_of_fake(buffer))
                    for name, buffer in self._model.net.named_buffers()
                    if not isinstance(buffer, FakeTensor)
                ]
            for key, (_, home, tensor) in self._numbers.items():
                if home == self.stage:
                    self._versions[key] = version_of(tensor)
            self.stage += 1
            self._starts.append(next_node_number())
            self._note_stage()

    def _number(self, tensor: Tensor, number: Number) -> None:
        if isinstance(tensor, FakeTensor):
            self._numbers[id(tensor)] = number, self.stage, tensor

    def _taken(self, tensor: Tensor) -> Tensor:
        entry = self._numbers.get(id(tensor))
        if entry is not None:
            number, home, _ = entry
            if home < self.stage and version_of(tensor) != self._versions[id(tensor)]:
                raise SplitError(
                    f"a value of shape {tuple(tensor.shape)} of an earlier stage is changed in "
                    f"place, and stage {self.stage} uses it under another name, but with "
                    f"{setting('engine', 'distributed')} the processes share no memory: change a "
                    "copy (.clone()), or cut elsewhere"
                )
        else:
            name = self._model.names.get(id(tensor))
            if name is None:
                if isinstance(tensor, FakeTensor):
                    raise _left_otherwise()
                return tensor
            if id(tensor) not in self._model.owners:
                return tensor
            number, home = name, self._model.owners[id(tensor)]
            if home > self.stage:
                raise SplitError(
                    f"stage {self.stage} uses {name!r}, which belongs to the later stage {home}: "
                    "cut elsewhere, so that the code that uses it is in one stage"
                )
        if home < self.stage:
            self._uses.add(number, home, self.stage, self._cuts and tensor.requires_grad)
            if not tensor.is_contiguous():
                self.rehearsal.strides[number] = tensor.stride()
        return tensor


class PartTrip(NumberedTrip):
    """The forward of a micro-batch in a process that has some of the stages.

    Args:
        rehearsal: what the others do.
        own: the stages of this process, in order.
        mode, model, microbatch, draws, enter_stage, leave_stage, trains: as for a `NumberedTrip`.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        own: Sequence[int],
        mode: FakeTensorMode,
        model: Model,
        microbatch: int,
        draws: Any,
        enter_stage: Callable[[int, int], None],
        leave_stage: Callable[[int, int], None],
        trains: bool,
    ) -> None:
        super().__init__(mode, model, microbatch, draws, enter_stage, leave_stage, trains)
        self._rehearsal = rehearsal
        self._own = own
        self._layers = 0  # called so far
        self._wanted = rehearsal.wanted
        self._kept: list[dict[Number, Tensor]] = [{} for _ in rehearsal.borders]
        self._arrived: list[dict[Number, Tensor]] = [{} for _ in rehearsal.borders]
        self._cuts_of: list[list[CutValue]] = [[] for _ in rehearsal.borders]

    # --- the forward

    def _through_stages(self, args: Any, kwargs: Any, head: Callable[[Any], HeadOutput]) -> None:
        with self.glue.off():
            args, kwargs = self.numbered_inputs((args, kwargs))
        with suppress(Left):
            super()._through_stages(args, kwargs, partial(self._with_values, head))

    def _input(self, value: Tensor | InputElsewhere, number: Number) -> Tensor:
        if isinstance(value, InputElsewhere):
            device = self._model.devices[0]
            fake = self._rehearsal.input(number, value.form, self._mode, device)
            self._numbers[id(fake)] = number, 0, fake
            return fake
        self._number(value, number)
        return value

    def _with_values(self, head: Callable[[Any], HeadOutput], output: Any) -> HeadOutput:
        with self.glue.off():
            output = self.output_here(output)
        return head(output)

    def enter(self, stage: int) -> None:
        """Moves to a later stage; leaves the forward after the last stage of this process."""
        self._check_order(stage)
        while self.stage < stage:
            if self.stage in self._own:
                self._check_path(self.stage + 1)
                if self.stage == self._own[-1]:
                    raise Left
                self.draws.leave_stage()
                self._leave_stage(self.stage, self.microbatch)
            self.stage += 1
            if self.stage in self._own:
                self._check_path(self.stage)
                self._enter_stage(self.stage, self.microbatch)
                # first the place: a device's generator is seeded by it
                self.draws.go_on(self._rehearsal.draws[self.stage])
                self.draws.enter_stage()

    def _check_path(self, stage: int) -> None:
        if self.events != self._rehearsal.events[stage]:
            raise self._another_path()

    def _another_path(self) -> SplitError:
        return SplitError(
            "the forward takes a different path than in its rehearsal, so the processes would not "
            f"agree on what they send: with {setting('engine', 'distributed')} the code between "
            "layers must do the same for each batch of the same shapes; use "
            f"{setting('engine', 'local')} for this model"
        )

    def arrive(self, stage: int, values: Sequence[Tensor]) -> None:
        """Takes the values that have crossed the border before a stage of this process."""
        with self.glue.off(), torch.enable_grad():
            self._starts.append(next_node_number())
            for crossing, tensor in zip(self._rehearsal.borders[stage - 1], values, strict=True):
                stride = self._rehearsal.strides.get(crossing.number)
                if stride is not None and tensor.stride() != stride:  # messages are dense
                    tensor = _with_strides(tensor, stride)
                if self._cuts and tensor.requires_grad:
                    alias = CutValue(tensor)
                    cut_leaf = self._model.cut_leaf[stage]
                    value = Cut.apply(cut_leaf, self, alias, tensor.device)
                    alias.value, alias.version, alias.node = value, version_of(value), value.grad_fn
                    self._cuts_of[stage].append(alias)
                    tensor = value
                self._arrived[stage][crossing.number] = tensor

    def outgoing(self, stage: int) -> list[Tensor]:
        """Returns the values that cross the border after a stage of this process."""
        values = []
        for number, _ in self._rehearsal.borders[stage]:
            value = self._kept[stage].get(number)
            if value is None:
                value = self._arrived[stage].get(number)
            if value is None and isinstance(number, str):
                value = self._model.net.get_parameter(number)
            if value is None:
                raise self._another_path()
            values.append(value)
        return values

    def stand_in(self, args: Any, kwargs: Any) -> Any:
        """Returns what stands for the output of the next layer."""
        if self._layers >= len(self._rehearsal.outputs):
            raise self._another_path()
        output = self._rehearsal.outputs[self._layers]
        self.draws.go_on(output.draws)
        assert self.layer is not None
        device = self._model.devices[0]
        returned = output.stand_in(self._mode, device, (args, kwargs))
        if not self.layer.stashes:
            return returned
        returned, stashed = returned
        for name, value in zip(self.layer.stashes, stashed, strict=True):
            stash(name, value)
        return returned

    def run_layer(self, place: LayerPlace, args: Any, kwargs: Any) -> Any:
        """Runs a layer, or what stands for it."""
        try:
            output = super().run_layer(place, args, kwargs)
            if place.stage in self._own and not place.stashes:
                self._check_output(place, output)
            return output
        finally:
            self._layers += 1

    def _check_output(self, place: LayerPlace, output: Any) -> None:
        """Compares the output of a layer of this process with its stand-in in the others."""
        if self._layers >= len(self._rehearsal.outputs):
            return
        if not self._rehearsal.outputs[self._layers].agrees_with(output):
            raise SplitError(
                f"layer {place.name!r} returns something else than in its rehearsal: with "
                f"{setting('engine', 'distributed')} the structure, shapes, dtypes and plain "
                "values of its output must depend on the shapes of its inputs alone, not on values "
                "nor on an attribute that changes; use "
                f"{setting('engine', 'local')} for this model"
            )

    def _number(self, tensor: Tensor, number: Number) -> None:
        if self.stage in self._own:
            if number in self._wanted[self.stage]:
                self._kept[self.stage][number] = tensor
                self._numbers[id(tensor)] = number, self.stage, tensor
        elif isinstance(tensor, FakeTensor):
            self._numbers[id(tensor)] = number, self.stage, tensor

    def _taken(self, tensor: Tensor) -> Tensor:
        entry = self._numbers.get(id(tensor))
        if entry is not None:
            number, home, _ = entry
        else:
            home = self._model.owners.get(id(tensor), -1)
            if home < 0 and self.stage in self._own and isinstance(tensor, FakeTensor):
                raise self._another_path()
            if home < 0:
                return tensor
            number = self._model.names[id(tensor)]
        if self.stage not in self._own:
            return self._fake(tensor)
        if home == self.stage:
            return tensor
        value = self._arrived[self.stage].get(number)
        if value is None:
            raise self._another_path()
        return value

    # --- the backward

    def in_flight(self, whole: Sequence[bool]) -> list[StageInFlight]:
        """Returns, after the forward, what the backward of each stage of this process needs."""
        head, self._head = self._head, None
        stages: list[StageInFlight] = []
        for stage, is_whole in zip(self._own, whole, strict=True):
            roots: list[Root]
            gradient = None
            if stage == self._last:
                assert head is not None
                roots, gradient = [] if head.root is None else [head.root], head.gradient
            else:
                roots = [edge_of(value) for value in self.outgoing(stage) if value.requires_grad]
            stages.append(StageInFlight(roots, gradient, self._cuts_of[stage], is_whole))
        return stages

    def _end(self) -> None:
        for alias in (alias for of_stage in self._cuts_of for alias in of_stage):
            alias.forget_graph()
        super()._end()
        self._numbers, self._fakes, self._kept, self._arrived = {}, {}, [], []


def _with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns a copy with other strides; where they are 0, one value is read several times."""
    sizes = [size if step else 1 for size, step in zip(tensor.shape, stride, strict=True)]
    memory = torch.empty_strided(sizes, stride, dtype=tensor.dtype, device=tensor.device)
    first = tensor.detach()[tuple(slice(size) for size in sizes)]
    return memory.copy_(first).expand(tensor.shape).requires_grad_(tensor.requires_grad)


def _zeros(tensor: Tensor) -> Tensor:
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return zeros.requires_grad_().clone() if tensor.requires_grad else zeros


def _left_otherwise() -> SplitError:
    return SplitError(
        "a value leaves a layer other than in its output (through a hook, an attribute or a list), "
        "or in an output of a class that cannot be unpacked, and the forward uses it "
        f"between layers: with {setting('engine', 'distributed')} the processes of other stages do "
        "not run the layer, and lack the value. Return it from the layer, in a tuple, a dict or a "
        f"dataclass, or use {setting('engine', 'local')}"
    )


def _asks_for_a_number() -> SplitError:
    return SplitError(
        "the forward reads the value of a tensor, for example by item(), float(), bool() or in an "
        f"if: with {setting('engine', 'distributed')} other processes do not have the value. "
        "Compute with the tensor instead, move the code into the layer that makes it, or use "
        f"{setting('engine', 'local')}"
    )


def _nothing(stage: int, microbatch: int) -> None:
    pass
