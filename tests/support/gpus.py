"""Hides the GPUs of this machine from the tests and from the processes that they start.

`conftest.py` imports this module before PyTorch. The tests check results on the CPU, with as many
devices as they ask for, and must not depend on how many GPUs a machine has. Tests marked `gpu` run
with `--gpu`, which makes the GPUs visible again.
"""

import os

# CUDA takes an empty list for "no GPU". ROCm's runtime ignores an empty one, but not "-1".
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}

_as_started = {name: os.environ.get(name) for name in HIDDEN}
os.environ.update(HIDDEN)


def show_gpus() -> None:
    """Restores the variables. CUDA reads them when it is first used, so call this before that."""
    for name, value in _as_started.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
