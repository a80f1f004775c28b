"""The backwards of a stage's micro-batches: whole or in two parts, and reduced over replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from torch import Tensor

from hybridtrain._base.shares import MicrobatchPlace
from hybridtrain.pipeline.autograd_graph import Root, run_from
from hybridtrain.pipeline.layer_rng import BackwardDraws
from hybridtrain.pipeline.reducer import LocalReducer, StageReducer, explaining_ready_twice
from hybridtrain.pipeline.split_backward import Division, SplitBackward, divide

_NONE: AbstractContextManager[None] = nullcontext()

# Where a backward starts, and the gradient there.
Start = tuple[Root, Tensor]

Explain = Callable[[RuntimeError], None]


class _ToWeights(NamedTuple):
    """The rest of a backward after its first part.

    Attributes:
        backward: None if nothing is left.
        roots: its start points, for a reducer that searches for unused parameters.
    """

    backward: SplitBackward | None
    roots: Sequence[Root]


class StageBackward:
    """Runs the backwards of one stage, which add to the gradients of its parameters.

    Attributes:
        reducer: averages the gradients over the replicas; None with one replica.
        places: the logical replica of each micro-batch of the step, if there are several.

    Each call takes `explain`, which is called with an error of a backward to attribute it to a
    layer, and may raise another one. It is not an attribute, because it is a method of the stage,
    which holds this.
    """

    def __init__(self) -> None:
        self.reducer: StageReducer | LocalReducer | None = None
        self.places: Sequence[MicrobatchPlace] | None = None
        self._to_weights: dict[int, _ToWeights] = {}
        self._divisions: dict[int, Division | None] = {}
        # None until a first backward has shown whether its graph can be divided
        self._may_split: bool | None = None

    def run(self, microbatch: int, starts: Sequence[Start], reduce: bool, explain: Explain) -> None:
        """Runs a whole backward.

        Args:
            microbatch: the index of the micro-batch.
            starts: the start points of the backward.
            reduce: whether it completes the stage's gradients, and averages them over the replicas.
            explain: see the class.
        """
        try:
            if self.reducer is None:
                with BackwardDraws():
                    run_from(starts)
            else:
                # Before the backward, which adds to the gradients that are there.
                self._begin_gradients(microbatch)
                roots = [root for root, _ in starts]
                with self._reducing(roots, reduce), BackwardDraws():
                    run_from(starts)
        except RuntimeError as error:
            explain(error)
            raise

    def divide(self, microbatch: int, roots: Sequence[Root], leaves: Sequence[Tensor]) -> None:
        """Divides the backward from `roots` for `to_input`, which otherwise does it.

        This needs no gradients, so it can run before they arrive.
        """
        # A graph that could not be divided once is not examined again; one that could may differ
        # between micro-batches.
        if self._may_split is False or microbatch in self._divisions:
            return
        division = divide(roots, leaves)
        self._may_split = self._may_split or division is not None
        self._divisions[microbatch] = division

    def to_input(
        self,
        microbatch: int,
        roots: Sequence[Root],
        starts: Sequence[Start],
        leaves: Sequence[Tensor],
        reduce: bool,
        whole: bool,
        explain: Explain,
    ) -> None:
        """Runs the part of a backward that the previous stage waits for.

        Runs the whole backward if its graph cannot be divided; `to_weights` then does nothing.

        Args:
            microbatch: the index of the micro-batch.
            roots: all start points of the backward.
            starts: those that have a gradient.
            leaves: the leaves that get a gradient in this part.
            reduce: as in `run`.
            whole: do not divide the backward, because both parts would recompute activations.
            explain: see the class.
        """
        if not whole:
            self.divide(microbatch, roots, leaves)
        division = self._divisions.pop(microbatch, None)
        if division is not None and len(starts) < len(roots):  # some values have no gradient
            # Only what is reached from values with a gradient runs, so the first division has too
            # many nodes.
            division = divide([root for root, _ in starts], leaves)
        parts = SplitBackward(division, starts, leaves) if division is not None else None
        if parts is None:
            # add to the weights after the backwards of earlier micro-batches, as in the unsplit
            # model
            for earlier, left in sorted(self._to_weights.items()):
                self._finish(earlier, left, False, explain)
                # The schedule still has their action, which then finds nothing to do.
                self._to_weights[earlier] = _ToWeights(None, ())
            self.run(microbatch, starts, reduce, explain)
        else:
            try:
                parts.to_input()
            except RuntimeError as error:
                explain(error)
                raise
        reduces = reduce and self.reducer is not None
        # Kept only if needed: a root keeps its graph alive.
        starts_of_reducer = [root for root, _ in starts] if reduces else ()
        self._to_weights[microbatch] = _ToWeights(parts, starts_of_reducer)

    def to_weights(self, microbatch: int, reduce: bool, explain: Explain) -> None:
        """Runs the part of a backward that `to_input` has left; for `reduce` see `run`."""
        self._finish(microbatch, self._to_weights.pop(microbatch), reduce, explain)

    def clear(self) -> None:
        """Drops all micro-batches after a failed step."""
        # A graph of a failed step would keep its activations.
        self._to_weights.clear()
        self._divisions.clear()
        if self.reducer is not None:
            self.reducer.reset()

    def _finish(self, microbatch: int, left: _ToWeights, reduce: bool, explain: Explain) -> None:
        backward, roots = left
        if backward is not None:
            self._begin_gradients(microbatch)
            try:
                with self._reducing(roots, reduce) if self.reducer is not None else _NONE:
                    backward.to_weights()
            except RuntimeError as error:
                explain(error)
                raise

    def _begin_gradients(self, microbatch: int) -> None:
        """Sets the logical replica of the next gradients of the weights."""
        if self.reducer is not None:
            self.reducer.begin(self.places[microbatch].replica if self.places else None)

    @contextmanager
    def _reducing(self, roots: Sequence[Root], reduce: bool) -> Iterator[None]:
        """Prepares the reducer for the backward in the block, which starts at `roots`."""
        assert self.reducer is not None
        if reduce:
            # The collectives start inside the backward, in the order of DDP's buckets. Each stage
            # has its own process group, so the order of a process's stages does not matter.
            self.reducer.prepare_for_backward(roots)
            with explaining_ready_twice():
                yield
            # After the block, in which the last all-reduce has been waited for.
            self.reducer.check_reduced()
        else:
            self.reducer.add_up_in_buckets()
            yield
