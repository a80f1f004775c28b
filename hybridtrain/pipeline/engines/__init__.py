"""Engines, which execute a step's schedule, by their name in `engine=`.

actions            the execution of actions, shared by all engines; `Wire`, the transport
threads            all stages in this process, connected by queues
processes          a process for each device, connected by messages
"""

from collections.abc import Callable, Sequence

from hybridtrain.pipeline.engine import Engine
from hybridtrain.pipeline.engines.processes import ProcessEngine
from hybridtrain.pipeline.engines.threads import InlineEngine, ThreadEngine
from hybridtrain.pipeline.links import Link
from hybridtrain.pipeline.stage import Stage
from hybridtrain.world import World

__all__ = ["ENGINES", "EngineMaker", "InlineEngine", "ProcessEngine", "ThreadEngine", "make_engine"]

EngineMaker = Callable[[Sequence[Stage], Sequence[Link], World], Engine]

ENGINES: dict[str, EngineMaker | None] = {
    "local": ThreadEngine,
    "distributed": ProcessEngine,
    "forward": None,
}
"""The engines of models with stages on several devices, by name.

None: it runs the model's own forward, on stages of another kind, see `pipeline.forward`.
"""


def make_engine(stages: Sequence[Stage], links: Sequence[Link], world: World) -> Engine:
    """Returns the engine for a pipeline.

    Args:
        stages: the stages of this process.
        links: the links between all stages of the pipeline; empty for an uncut model.
        world: the processes.
    """
    on_one_device = len(world.devices) == world.processes_per_replica == 1
    engine = InlineEngine if on_one_device or not links else ENGINES[world.engine]
    assert engine is not None
    return engine(stages, links, world)
