"""Where the modules of a model run: the calls of its layers, and of units that are opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import nn

from hybridtrain._base.skip import popped_by, stashed_by
from hybridtrain.partitioning import PlannedLayers


class Runs(Protocol):
    """Runs the layers of a stage."""

    def run(self, position: int, trip: Any, args: Any, kwargs: Any) -> Any:
        """Returns what a layer returns, by its position in the stage."""


class LayerPlace(NamedTuple):
    """Where a layer runs.

    Attributes:
        number: the index of the layer in the model.
        unit: the number of the unit that it is a piece of, see `layer_rng`.
        stage: the index of its stage.
        name: the name of its module.
        position: the index of the layer in its stage.
        runs: the layers of its stage.
        stashes: the names of values that it stashes for later layers, see `_base/skip`.
        pops: the names of values that it pops.
    """

    number: int
    unit: int
    stage: int
    name: str
    position: int
    runs: Runs
    stashes: tuple[str, ...]
    pops: tuple[str, ...]


class OpenedUnit(NamedTuple):
    """A call of a module whose submodules are layers; its own code runs in their stages.

    Attributes:
        number: the number of the unit.
        stage: the index of the stage of its first layer.
    """

    number: int
    stage: int


Place = LayerPlace | OpenedUnit


class LayersElsewhere:
    """The layers of a stage of another process; see `PartTrip`."""

    def run(self, position: int, trip: Any, args: Any, kwargs: Any) -> Any:
        """Returns what stands for the output of a layer."""
        return trip.stand_in(args, kwargs)


def places_of(
    net: nn.Module, planned: PlannedLayers, runs: Mapping[int, Runs]
) -> dict[int, list[Place]]:
    """Returns the places of the modules of a model, by the `id` of the module.

    Args:
        net: the model, or a copy of the planned one.
        planned: the layers.
        runs: what runs the layers of each stage; other processes run those of the others.
    """
    assert planned.net is not None
    names = {id(module): name for name, module in planned.net.named_modules()}
    places: dict[int, list[Place]] = {}
    index = 0
    for stage, layers in enumerate(planned.stages):
        of_stage = runs.get(stage, LayersElsewhere())
        for position, layer in enumerate(layers):
            unit, piece = planned.units[index]
            if unit in planned.opened and not piece:
                opened = net.get_submodule(planned.opened[unit])
                places.setdefault(id(opened), []).append(OpenedUnit(unit, stage))
            module = net.get_submodule(names[id(layer.module)])
            names_of_values = stashed_by(module), popped_by(module)
            place = LayerPlace(index, unit, stage, layer.name, position, of_stage, *names_of_values)
            places.setdefault(id(module), []).append(place)
            index += 1
    return places
