"""The command `evaluate`: computes the loss and metrics of a trained run."""

from __future__ import annotations

import logging
import time

from hybridtrain.cli.commands.result import Result, values_in_words
from hybridtrain.cli.commands.trained_run import load_trained_run
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.run.context import RunContext
from hybridtrain.cli.run.errors import print_result
from hybridtrain.loop import evaluate as evaluate_model

_log = logging.getLogger(__name__)


def evaluate(settings: Settings) -> Result:
    """Evaluates the best or newest checkpoint of a run, or the checkpoint in `resume`.

    It prints the values to stdout as one line of JSON and appends one to `evaluations.jsonl`.
    """
    context, loader, checkpoint, step = load_trained_run(settings, RunContext.eval_loader)
    directory = context.directory
    options = context.options
    assert options.loss_fn is not None  # see `PARTS`
    values = evaluate_model(context.model, loader, options.loss_fn, options.metrics)
    _log.info(
        "%s, step %d: %s  (%d samples)",
        checkpoint,
        step,
        values_in_words(values),
        values["samples"],
    )
    if context.world.is_main:
        result = {"checkpoint": str(checkpoint), "step": step, **values}
        print_result(result)
        changes = {change.key: change.other for change in settings.changes}
        if directory.path.is_dir():
            directory.add_evaluation({"time": round(time.time(), 3), **result, "changes": changes})
    context.world.close()
    return {"step": step, **values}
