"""A pipeline that runs the model's own forward: `engine="local"`.

engine     threads for trips and for backwards; the step
trip       a micro-batch on its way through the stages
glue       the code between layers, and the cuts of the autograd graph
turns      the turns of a device
places     where each call of a module runs
layers     the calls of layers, compiled and recomputed
stage      what belongs to a device: layers, state, backwards
build      places layers on devices, and connects all of this
"""

from hybridtrain.pipeline.forward.build import build_forward_stages, forward_engine, of_other_code
from hybridtrain.pipeline.forward.layers import uninstall
from hybridtrain.pipeline.forward.parts_here import PartsHere
from hybridtrain.pipeline.forward.stage import ForwardStage
from hybridtrain.pipeline.forward.trip import StageInFlight, for_other_thread, net_of_trip

__all__ = [
    "ForwardStage",
    "PartsHere",
    "StageInFlight",
    "build_forward_stages",
    "for_other_thread",
    "forward_engine",
    "net_of_trip",
    "of_other_code",
    "uninstall",
]
