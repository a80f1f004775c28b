"""`pipelined(model)`: a pipeline in the trainer that a script already has.

switch     `pipelined` and `unpipelined`
surface    the subclass that a pipelined model gets: calls, patches, copies, and what is refused
runner     the pipeline of a model, and which way a call takes
calls      the arguments of a call, cut into micro-batches
device_map a model that accelerate has put on several devices
joining    the outputs of micro-batches as the output of the batch, proved for each kind of call
shares     how much each micro-batch counts in a number, by many rules
steps      the two forms of a call with gradients
attach     outputs whose backward is a function
optimizers steps of optimizers that have replaced parameters, refused
replicas   the copies of the model in several processes
"""

from hybridtrain.piped.switch import is_pipelined, pipelined, unpipelined

__all__ = ["is_pipelined", "pipelined", "unpipelined"]
