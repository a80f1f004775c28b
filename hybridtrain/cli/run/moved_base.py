"""Loads the moved base of an adapter's checkpoint from `init_from`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from hybridtrain.checkpoint import init_from, is_moved, parse_init_from
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.context import RunContext
from hybridtrain.errors import naming


def place_of_base(config: Config) -> str | None:
    """Returns the location of the base in `init_from`, or None."""
    arguments = parse_init_from(config.init_from)
    return None if arguments is None else str(arguments["source"])


def naming_source(config: Config) -> AbstractContextManager[None]:
    """Makes messages about `init_from` name the key that it is read from, such as model.source."""
    source = config.model.get("source")
    is_read = source is not None and place_of_base(config) == source
    return naming({"init_from": "model.source"} if is_read else {})


def load_moved_base(context: RunContext, checkpoint: Path) -> None:
    """Loads the base of a checkpoint into the model if it was moved; a collective call.

    `restore_checkpoint` then reads it from the same place.

    Raises:
        CheckpointError: there are no weights that fit the model.
    """
    arguments = parse_init_from(context.config.init_from)
    if arguments is None:
        return
    source = arguments["source"]
    if context.world.from_main(lambda: is_moved(checkpoint, source)):
        init_from(context.model, **arguments)
