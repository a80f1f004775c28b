"""Small modules that all other packages use; they import only each other and `errors`.

accelerator      streams, events and memory of a device: CUDA, or none
adapter          trained tensors in a model with frozen weights from another source
attention        the kernel of `scaled_dot_product_attention`
codec            a closed binary format for values exchanged between processes
construction     constructs a model without values, or a part of a model
contents         the contents of mutable objects, to restore them in place
devices          chooses a process's devices and backend
files            files that are complete or absent, opened without following links
hardware         the hardware that costs are predicted for: devices, nodes and links
intra_op_threads the number of threads that a kernel on the CPU uses
kernel_downloads an import of bitsandbytes that downloads no code
microbatch       cuts a batch into micro-batches
module_call      a replacement of what calling a module does
objects          sends values between processes, encoded by the codec
output_layer     the layer that a model of transformers says computes its output
patched_forwards forwards that libraries have put on a module, in its copies
plain_numbers    numbers of NumPy and other libraries as Python numbers
precision        autocast, and the thread-local state that engine threads inherit
problem          an error of one process, sent to the others so that all raise it
python_draws     tells of draws from the default generators of Python and NumPy
rank_differences compares facts that must be equal on all ranks
registry         packages whose modules are imported when one of their names is first used
repeatable       what decides the bits of a result, to set it and to compare it over the ranks
replica_shares   the samples of each replica in a batch, in proportion to the replicas' shares
repacked_weights 4-bit layers of bitsandbytes, which an evaluation would repack
shared_gpus      several ranks on one GPU
shared_libraries how many shared libraries the process has loaded
shares           a batch made of shares, one for each logical replica of a process
skip             `stash` and `pop`: tensors that skip layers of a sequential model
summation_tree   the order in which the gradients of logical replicas are summed
symbolic_sizes   sizes that are symbols, in tensors without values
tensors          storages and sizes of tensors
text_table       text tables
torch_private    every private API of PyTorch that the library uses
yaml_text        YAML that may come from someone else
user_code        the user's code as opposed to libraries: the names it looks up, its generators
"""
