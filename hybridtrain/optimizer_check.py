"""Checks that an optimizer trains the model as it is now."""

from __future__ import annotations

import logging

from torch.optim import Optimizer

from hybridtrain.errors import ConfigError
from hybridtrain.model import HybridModel
from hybridtrain.pipeline.pipeline import Pipeline

log = logging.getLogger(__name__)


def check_optimizer(model: HybridModel, optimizer: Optimizer) -> Pipeline:
    """Warns of parameters that are not trained; returns the pipeline that it has looked at.

    A pipeline that follows a changed model is another one, and the check is due again.

    Raises:
        ConfigError: the model has parameters that the optimizer does not, and the other way round:
            the model was changed after the optimizer was made.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    left_out = [name for name, parameter in trainable.items() if id(parameter) not in held]
    if left_out:
        named = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        foreign = held - {id(parameter) for parameter in model.parameters()}
        if foreign:
            raise ConfigError(
                f"optimizer= holds {len(foreign)} parameters that the model does not have, and "
                f"not {named}: the model was changed after the optimizer was made; make it anew"
            )
        if model.world.is_main:
            log.warning(
                "optimizer= leaves out %d of %d trainable parameters: %s. If that is meant, "
                "requires_grad_(False) saves their gradients",
                len(left_out),
                len(trainable),
                named,
            )
    return model.pipeline
