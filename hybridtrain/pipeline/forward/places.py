"""Where the modules of a model run: the calls of its layers, and of units that are opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hybridtrain.pipeline.forward.layers import LayersOfStage


class LayerPlace(NamedTuple):
    """Where a layer runs.

    Attributes:
        number: the index of the layer in the model.
        stage: the index of its stage.
        name: the name of its module.
        position: the index of the layer in its stage.
        runs: the layers of its stage.
    """

    number: int
    stage: int
    name: str
    position: int
    runs: LayersOfStage


class OpenedUnit(NamedTuple):
    """A call of a module whose submodules are layers; its own code runs in their stages.

    Attributes:
        number: the number of the unit.
        stage: the index of the stage of its first layer.
    """

    number: int
    stage: int


Place = LayerPlace | OpenedUnit
