"""Starts the command line as a user does: in processes of its own, alone or under torchrun."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_")
_ALSO = ("RANK", "WORLD_SIZE")

# A run of a few steps of the recipe `digits`, on the CPU.
SMALL = [
    "recipe=digits",
    "world.devices=cpu",
    "data.batch_size=32",
    "pipeline.chunks=4",
    "trainer.epochs=null",
    "trainer.steps=6",
    "trainer.log_every=2",
    "trainer.eval_every=4",
    "checkpoint.every_steps=2",
]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's variables, with one thread a process."""
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(_OF_LAUNCHERS) and key not in _ALSO
    }
    return {**own, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(extra or {})}


@contextmanager
def logging_as_before() -> Iterator[None]:
    """Undoes what a run in this process did to the root logger."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.setLevel(level)
        root.handlers[:] = handlers
        logging.captureWarnings(False)


def single(
    args: Sequence[str], timeout: float = 100, env: Mapping[str, str] | None = None, flags: str = ""
) -> subprocess.CompletedProcess[str]:
    """`python -m hybridtrain <args>`; `flags` are the interpreter's."""
    command = [sys.executable, *flags.split(), "-m", "hybridtrain", *args]
    return _run(command, timeout, env)


def torchrun(
    nproc: int, args: Sequence[str], timeout: float = 100, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone --nproc-per-node <nproc> -m hybridtrain <args>`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(nproc), "-m", "hybridtrain", *args]
    return _run(command, timeout, env)


def _run(
    command: Sequence[str], timeout: float, env: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment(env)
    )
