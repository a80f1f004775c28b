"""Small modules that all other packages use; they import only one another and `errors`.

accelerator      streams, events and memory of a device: CUDA, or none
codec            a closed binary format for values that processes exchange
construction     construction of a model without values, or of a part of it
devices          chooses a process's devices and backend
files            files that are complete or absent, opened without following links
joining, values  checks for merging outputs, and the kinds of values in them
microbatch       cuts a batch into micro-batches
objects          values sent between processes, as bytes of the codec
precision        autocast, and the thread-local state that engines pass on to their threads
skip             `stash` and `pop`: tensors that skip layers of a sequential model
tensors          storages and sizes of tensors
text_table       tables of text
torch_private    every private API of PyTorch that the library uses
user_code        tells the user's code from libraries: the names it looks up, its generators
"""
