"""What a layer returns for arguments of other sizes, from one run on sizes that are symbols.

Texts are padded to ever new lengths. A layer that has run on some of them runs once more, with a
symbol for each number that has differed:

    examples      [2, 10, 64]  ->  layer  ->  [2, 10, 256]
                  [2, 12, 64]             ->  [2, 12, 256]
                  [2, 17, 64]             ->  [2, 17, 256]
    with symbols  [2, s, 64]              ->  [2, s, 256]    if s >= 2
    later         [2, 40, 64]             ->  [2, 40, 256]   without a run

As in `torch.compile`, each question about a number, of the layer's code or of PyTorch's, becomes a
condition. Where all have the answers of this run, the layer takes the same path, and the formulas
hold; they are also compared with the examples. Elsewhere the layer runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridtrain.pipeline.forward.rehearsal import LayerOutput, ValueFormat

if TYPE_CHECKING:
    from hybridtrain._base.symbolic_sizes import SymbolicSizes

log = logging.getLogger("hybridtrain")

# Runs from which formulas are made, and how often that is tried for a layer. A run with symbols
# takes as long as ten others, and most pipelines have a batch of full size and a last one.
_EXAMPLES, _ATTEMPTS = 3, 3

SymbolicRun = Callable[["SymbolicSizes", Sequence[Any]], LayerOutput]
"""Runs a layer on arguments with these sizes and strides, see `numbers_of`."""


class Answer(NamedTuple):
    """What a layer has returned, and how often it has drawn random numbers."""

    output: LayerOutput
    draws: int


def numbers_of(formats: Sequence[Any]) -> tuple[int, ...]:
    """Returns all sizes and strides of the tensors among formats and other values."""
    tensors = (form for form in formats if type(form) is ValueFormat)
    return tuple(number for form in tensors for number in (*form.shape, *form.stride))


def with_numbers(formats: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
    """Returns the formats with other sizes and strides; other values as they are."""
    rest = iter(numbers)
    return [
        form._replace(
            shape=tuple(next(rest) for _ in form.shape),
            stride=tuple(next(rest) for _ in form.stride),
        )
        if type(form) is ValueFormat
        else form
        for form in formats
    ]


def kinds_of(formats: Sequence[Any]) -> tuple[Hashable, ...]:
    """Returns what formats are besides sizes and strides; None for other values."""
    return tuple(
        (len(form.shape), form.dtype, form.requires_grad) if type(form) is ValueFormat else None
        for form in formats
    )


class LayerFormulas:
    """What is known of equal layers whose arguments differ in sizes and strides alone."""

    def __init__(self) -> None:
        self._examples: dict[tuple[int, ...], Answer] = {}
        self._formulas: list[_Formula] = []
        self._attempts = 0

    def answer(self, numbers: tuple[int, ...]) -> Answer | None:
        """Returns what the layer would return; None if that is not known.

        Args:
            numbers: the sizes and strides of its arguments, see `numbers_of`.
        """
        example = self._examples.get(numbers)
        if example is not None:
            output = example.output
            return Answer(output.with_formats(output.formats), example.draws)
        answers = (formula.answer(numbers) for formula in self._formulas)
        return next((answer for answer in answers if answer is not None), None)

    @property
    def is_due(self) -> bool:
        """Whether the next example is the last one before `learn`."""
        return len(self._examples) == _EXAMPLES - 1 and self._attempts < _ATTEMPTS

    def add(self, numbers: tuple[int, ...], answer: Answer) -> None:
        """Notes what the layer has returned."""
        if len(self._examples) < _EXAMPLES:
            self._examples[numbers] = answer

    def learn(self, run: SymbolicRun) -> None:
        """Makes formulas from the examples.

        Args:
            run: runs the layer.
        """
        # if the last run was no example, or another call has learned
        if len(self._examples) < _EXAMPLES:
            return
        examples, self._examples = self._examples, {}
        self._attempts += 1
        try:
            self._formulas.append(_Formula(examples, run))
        except Exception as error:  # such as code that needs values
            log.debug("no formulas for what a layer returns: %s", error)


class _Formula:
    """The output of a layer, with formulas in the place of sizes and strides.

    Args:
        examples: by the sizes and strides of the arguments, what the layer has returned.
        run: runs it.

    Raises:
        Exception: there are no such formulas.
    """

    def __init__(self, examples: dict[tuple[int, ...], Answer], run: SymbolicRun) -> None:
        # imports PyTorch's compiler, which optimizers import as well
        from hybridtrain._base.symbolic_sizes import SymbolicSizes

        self._answer = list(examples.values())[-1]
        sizes = SymbolicSizes()
        # numbers that were always equal to one another are one symbol
        self._places: dict[tuple[int, ...], int] = {}
        self._columns = list(zip(*examples, strict=True))
        symbols: list[Any] = []
        for column in self._columns:
            if len(set(column)) > 1 and column not in self._places:
                self._places[column] = len(symbols)
                symbols.append(sizes.new(column[-1]))
        output = run(
            sizes,
            [
                symbols[self._places[column]] if column in self._places else column[0]
                for column in self._columns
            ],
        )
        example_output = self._answer.output
        same_kinds = kinds_of(output.formats) == kinds_of(example_output.formats)
        if not (same_kinds and output.has_structure_of(example_output)):
            raise ValueError("a run with symbols returns something else")
        self._compute = sizes.formula(numbers_of(output.formats))
        confirmed = 0
        for numbers, example in examples.items():
            answer = self.answer(numbers)
            if answer is None:  # another path
                continue
            confirmed += 1
            if (
                answer.draws != example.draws
                or answer.output.formats != example.output.formats
                or not answer.output.has_structure_of(example.output)
            ):
                raise ValueError("a run with symbols has other formats")
        if confirmed < 2:
            raise ValueError("the layer takes another path for each size")

    def answer(self, numbers: tuple[int, ...]) -> Answer | None:
        """See `LayerFormulas`."""
        values: list[int] = [0] * len(self._places)
        is_set = [False] * len(values)
        for number, column in zip(numbers, self._columns, strict=True):
            place = self._places.get(column)
            if place is None:
                if number != column[0]:
                    return None
            elif not is_set[place]:
                values[place], is_set[place] = number, True
            elif number != values[place]:
                return None
        results = self._compute(values)
        if results is None or any(type(number) is not int for number in results):
            return None
        output = self._answer.output
        formats = with_numbers(output.formats, results)
        return Answer(output.with_formats(formats), self._answer.draws)
