"""The command `verify`: compares the pipeline with the unsplit model on a run's first batches."""

from __future__ import annotations

import logging
from contextlib import closing

import torch

from hybridtrain.cli.commands.layout_tables import placement_tables
from hybridtrain.cli.commands.result import Result
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.run.build import build_run
from hybridtrain.errors import NotExactError
from hybridtrain.verification import verify as verify_model

_log = logging.getLogger(__name__)

# The number of training steps that `verify` compares.
_VERIFIED_BATCHES = 3


def verify(settings: Settings) -> Result:
    """Compares a run's first steps and evaluations with those steps of the unsplit model.

    Both start from the run's initial weights and use the first batches of the training data.

    Raises:
        NotExactError: they differ by more than the order of additions explains.
    """
    context = build_run(settings, reuse_plan=False)
    config, world = context.config, context.world
    assert context.options.loss_fn is not None  # see `PARTS`
    _log.info("%s", placement_tables(context.model.plan, world))
    torch.manual_seed(config.seed)  # the seed of the pipeline's initial weights
    reference = context.build()
    with closing(context.train_loader().stream()) as stream:
        batches = [next(stream) for _ in range(_VERIFIED_BATCHES)]
    verification = verify_model(
        context.model,
        [(batch.inputs, batch.targets) for batch in batches],
        context.options.loss_fn,
        reference,
    )
    if not verification.exact:
        raise NotExactError(str(verification))
    _log.info("%s", verification)
    world.close()
    return {"exact": verification.exact, "largest_difference": verification.worst.largest}
