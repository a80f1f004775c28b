"""Engines: what executes a step's schedule, by the name that `engine=` chooses."""

from collections.abc import Callable, Sequence

from hybridtrain.pipeline.engines.processes import ProcessEngine
from hybridtrain.pipeline.engines.threads import ThreadEngine
from hybridtrain.pipeline.links import Link
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.step import Engine
from hybridtrain.world import World

__all__ = ["ENGINES", "ProcessEngine", "ThreadEngine"]

# An engine is made from the stages that this process owns, the links of the whole pipeline, and the
# processes.
ENGINES: dict[str, Callable[[Sequence[Stage], Sequence[Link], World], Engine]] = {
    "local": ThreadEngine,
    "distributed": ProcessEngine,
}
