"""Small modules that every other package builds on; they import only one another and `errors`.

accelerator      streams, events and memory of a device: CUDA, or none
construction     a model without values, or in parts
devices          the devices of a process, and the backend that fits them
files            files that are complete or absent, and are opened without following links
joining, values  the outputs of micro-batches joined again, and the kinds of values in them
microbatch       a batch cut into micro-batches
precision        autocast, and the thread-local state that engines pass on to their threads
skip             `stash` and `pop`: tensors that skip layers of a sequential model
tensors          what a tensor is made of, and its bytes
text_table       tables of text
torch_private    every private API of PyTorch that the library uses, in one place
user_code        the code of the user as opposed to libraries: the names it looks up, its generators
"""
