"""A pipeline that runs the model's own forward, in one process or over several.

engine           threads for trips and for backwards; the step
trip             a micro-batch on its way through the stages
values           the values of earlier stages, as a stage uses them
glue             the code between layers, and the cuts of the autograd graph
turns            the turns of a device
places           where each call of a module runs
layers           the calls of layers, compiled and recomputed
buffer_writers   which stages change which buffers, for the self-check
stage            what belongs to a device: layers, state, backwards
build            places layers on devices, and connects all of this
rehearsal        what crosses the borders between processes
layer_formulas   what a layer returns for arguments of other sizes
rehearsed_layers which layers run in a rehearsal, and what is known of the others
part_trip        a trip where other processes have some of the stages
part_engine      the engine of a process with some of the stages
part_transport   the inputs and messages of such a process
parts_here       all such processes as threads of one, for comparisons
"""

from hybridtrain.pipeline.forward.build import build_forward_stages, forward_engine, of_other_code
from hybridtrain.pipeline.forward.glue import unwatched
from hybridtrain.pipeline.forward.layers import uninstall
from hybridtrain.pipeline.forward.parts_here import PartsHere
from hybridtrain.pipeline.forward.stage import ForwardStage
from hybridtrain.pipeline.forward.trip import StageInFlight, net_of_trip, own_values

__all__ = [
    "ForwardStage",
    "PartsHere",
    "StageInFlight",
    "build_forward_stages",
    "forward_engine",
    "net_of_trip",
    "of_other_code",
    "own_values",
    "uninstall",
    "unwatched",
]
