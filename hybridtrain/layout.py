"""The layout of a run as text: which process has which stages, layers and devices."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from hybridtrain.model import HybridModel


def describe_layout(model: HybridModel, schedule: str) -> str:
    """A table of the stages and, below it, the devices of every process; a collective call."""
    world = model.world
    places = world.gather((socket.gethostname(), [str(device) for device in world.devices]))
    parameters = sum(stage.count_parameters() for stage in model.stages)
    head = (
        f"{_count(world.size, 'process', 'es')} x {_count(world.nb_part, 'stage')}, {schedule}, "
        f"{_count(model.chunks, 'micro-batch', 'es')}, {parameters:,} parameters, "
        f"started by {world.launcher}, {world.backend}"
    )
    rows = [("stage", "layers", "parameters", "share", "from ... to")]
    for stage in model.stages:
        own = stage.count_parameters()
        first, last = stage.layers[0].name, stage.layers[-1].name
        rows.append(
            (
                str(stage.index),
                str(len(stage.layers)),
                f"{own:,}",
                f"{own / max(1, parameters):.0%}",
                first if first == last else f"{first} ... {last}",
            )
        )
    processes = [("rank", "host", "devices, by stage")]
    processes += [
        (str(rank), host, " ".join(devices)) for rank, (host, devices) in enumerate(places)
    ]
    return "\n".join([head, *_table(rows, numbers=4), *_table(processes, numbers=1)])


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def _table(rows: Sequence[Sequence[str]], numbers: int) -> list[str]:
    """Columns of equal width; the first `numbers` of them are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if index < numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
