"""The engines of traced pipelines, for `engine="distributed"`.

`engine="local"` runs the model's own forward, see `pipeline.forward`.

actions            the execution of actions, shared by both engines; `Wire`, the transport
processes          a process for each device, connected by messages
inline             all stages in this process, one action at a time
"""

from collections.abc import Callable, Sequence

from hybridtrain.pipeline.engine import Engine
from hybridtrain.pipeline.engines.inline import InlineEngine
from hybridtrain.pipeline.engines.processes import ProcessEngine
from hybridtrain.pipeline.links import Link
from hybridtrain.pipeline.stage import Stage
from hybridtrain.world import World

__all__ = ["ENGINES", "EngineMaker", "InlineEngine", "ProcessEngine", "make_engine"]

EngineMaker = Callable[[Sequence[Stage], Sequence[Link], World], Engine]

ENGINES: dict[str, EngineMaker | None] = {
    "local": None,
    "distributed": ProcessEngine,
}
"""The engines, by name. None: it runs the model's own forward, see `pipeline.forward`."""


def make_engine(stages: Sequence[Stage], links: Sequence[Link], world: World) -> Engine:
    """Returns the engine for a traced pipeline.

    Args:
        stages: the stages of this process.
        links: the links between all stages of the pipeline; empty for an uncut model.
        world: the processes.
    """
    engine = ENGINES[world.engine]
    if engine is None or not links:
        return InlineEngine(stages, links, world)
    return engine(stages, links, world)
