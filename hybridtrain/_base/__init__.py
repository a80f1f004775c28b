"""Small modules that all other packages use; they import only each other and `errors`.

accelerator      streams, events and memory of a device: CUDA, or none
codec            a closed binary format for values exchanged between processes
construction     constructs a model without values, or a part of a model
devices          chooses a process's devices and backend
files            files that are complete or absent, opened without following links
joining, values  checks for merging outputs, and the kinds of values in outputs
microbatch       cuts a batch into micro-batches
objects          sends values between processes, encoded by the codec
precision        autocast, and the thread-local state that engine threads inherit
skip             `stash` and `pop`: tensors that skip layers of a sequential model
tensors          storages and sizes of tensors
text_table       text tables
torch_private    every private API of PyTorch that the library uses
user_code        the user's code as opposed to libraries: the names it looks up, its generators
"""
