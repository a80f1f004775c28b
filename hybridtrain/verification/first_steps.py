"""The checks of a model's first steps: which of them are due, and how they run.

                   compares                                        due in
    forward_check  the stages with plain PyTorch, on copies        a kind's steps 1, 4, 8, 16, ...
    loss_proof     the loss of samples with those of their parts   the first step of a loss
    joining        outputs for two numbers of samples              the first output of its kind

Two more run inside steps, where the values are that they compare: `pipeline.recomputation_proof`
and, over processes, `pipeline.agreement`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hybridtrain._base.microbatch import batch_size, split
from hybridtrain.errors import ConfigError
from hybridtrain.loss import CountedLoss, model_output
from hybridtrain.pipeline import HeadOutput, Pipeline, StepKind
from hybridtrain.verification.captures import SeenLosses
from hybridtrain.verification.cut_model import CutModel
from hybridtrain.verification.forward_check import ForwardCheck
from hybridtrain.verification.joining import JoinProof, check_same_but_samples
from hybridtrain.verification.loss_proof import (
    LogProbabilityCheck,
    ModelLossProof,
    OutputProof,
    is_of_model,
)
from hybridtrain.verification.python_state import undone

log = logging.getLogger("hybridtrain")

RunForward = Callable[[Sequence[Any], Callable[[int, Any], HeadOutput]], list[Any]]
"""`run(parts, head)` runs the forward of micro-batches, and returns the values of `head`."""


class FirstSteps:
    """The checks of one model.

    Args:
        model: the model.
        pipeline: its pipeline.
    """

    def __init__(self, model: CutModel, pipeline: Pipeline) -> None:
        self._net, self._world, self._pipeline = model.net, model.world, pipeline
        self._forward = ForwardCheck(model)
        self._losses = SeenLosses()
        self._joined = JoinProof()

    def without_forward_check(self) -> AbstractContextManager[None]:
        """Leaves out the comparison with plain PyTorch inside the block."""
        return self._forward.off()

    def before(self, inputs: Any, sizes: Sequence[int], kind: StepKind, *, trains: bool) -> None:
        """Compares the stages with plain PyTorch, if that is due; see `ForwardCheck.check_batch`.

        Raises:
            NotExactError: the stages compute something else.
        """
        self._forward.check_batch(inputs, sizes, kind, trains=trains)

    def of_loss(
        self,
        loss: CountedLoss,
        inputs: Any,
        targets: Any,
        sizes: Sequence[int],
        *,
        is_whole: bool,
        has_targets: Callable[[Any], bool],
        evaluate: RunForward,
    ) -> OutputProof | LogProbabilityCheck | None:
        """Returns the check that observes the outputs of a step; None if none is due.

        A collective call in the pipeline: for a loss computed by the model it runs a forward.

        Args:
            loss: the loss of the step.
            inputs: the inputs of the batch.
            targets: the targets of the batch.
            sizes: the sizes of its micro-batches.
            is_whole: the step has one micro-batch, so no mean over micro-batches is taken.
            has_targets: whether some process has targets, from those of this one.
            evaluate: runs the forward in evaluation mode.

        Raises:
            ConfigError: the loss contradicts its count.
        """
        # The same answer in all processes of a pipeline, which have the same loss.
        if loss.is_known_reduction and not loss.takes_log_probabilities:
            return None
        is_one = is_whole or sum(sizes) == 1
        if not self._losses.is_new(loss, divided=not is_one):
            return None
        # Collective: only the last process reads targets. Asked only for a new loss, since it waits
        # for the others.
        if not has_targets(targets):
            targets = None
        if is_one and is_of_model(loss, targets):
            return None
        if loss.is_known_reduction or is_one:
            return LogProbabilityCheck(loss, targets, sum(sizes))

        def warn(text: str, *args: object) -> None:
            if self._world.data_parallel_rank == 0 and self._losses.should_warn(loss):
                log.warning(text, *args)

        if is_of_model(loss, targets):
            proof = ModelLossProof(loss, inputs, targets, sizes, warn)
            with self._further_forward("the model's loss could not be compared with its count"):
                # A forward of the whole pipeline, so each process calls it, whether or not it has
                # the head.
                evaluate(proof.inputs, proof.head)
            if loss.function is model_output:
                return None
        # in the step itself too, if the loss is computed from per-sample outputs
        return OutputProof(loss, inputs, targets, sizes, warn)

    def of_outputs(
        self, inputs: Any, outputs: Sequence[Any], sizes: Sequence[int], run: RunForward
    ) -> None:
        """Compares outputs that are to be joined with outputs for a different number of samples.

        All processes of a pipeline call it together.

        Args:
            inputs: the inputs of the batch, of more than one sample.
            outputs: the outputs of its micro-batches on the last stage; empty elsewhere.
            sizes: the sizes of its micro-batches.
            run: runs the forward.

        Raises:
            BatchError: a value depends on the number of samples other than by its size in dim 0.
        """
        total = batch_size(inputs)
        other_size = sizes[0] + 1 if total > sizes[0] else sizes[0] - 1
        # Only the last process has outputs, and all must run the forward together.
        if not other_size or not self._pipeline.any_process(self._joined.asks(outputs, sizes)):
            return
        part = split(inputs, [other_size, total - other_size])[0]
        others: list[Any] = []
        with (
            self._further_forward("outputs could not be compared before they were joined"),
            undone(self._net, self._world.devices),
        ):
            others = run([part], lambda _, output: HeadOutput(output))
        if outputs and others:
            check_same_but_samples(outputs[0], sizes[0], others[0], other_size)

    @contextmanager
    def _further_forward(self, otherwise: str) -> Iterator[None]:
        """Surrounds a forward that only a check needs: where it fails, the check is left out."""
        try:
            with torch.no_grad():
                yield
        except ConfigError:
            raise
        except Exception as error:
            if self._world.pipeline_group is not None:  # the other processes wait
                error.add_note("in a further forward, which checks the step")
                raise
            log.warning("%s: a further forward failed: %s", otherwise, error)
