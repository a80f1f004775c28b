"""Several ranks on one GPU: refused by default, because NCCL is made for one rank per GPU.

`world.share_gpus` allows it, for tests of messages and errors on a machine with fewer GPUs than
ranks. From NCCL 2.30 on, a variable allows it. Earlier releases reject two ranks with the same host
and GPU, so each rank gets a host id of its own, and NCCL connects the ranks as if they were on
different hosts, through sockets. NCCL reads the variables when it creates its first communicator.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from hybridtrain.errors import WorldError, argument, setting

_ALLOWS_SHARING = (2, 30)


def physical_gpus(devices: Sequence[torch.device]) -> list[str]:
    """Returns the identity of each GPU in `devices`, which is the same in all processes.

    GPU indices differ if each process sees different GPUs.
    """
    return [
        f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
        for device in devices
        if device.type == "cuda"
    ]


def ranks_by_shared_gpu(gpus: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Returns the GPUs that several ranks use, with these ranks.

    Args:
        gpus: `physical_gpus` of each rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, gpus_of_rank in enumerate(gpus):
        for gpu in dict.fromkeys(gpus_of_rank):  # a rank may have several stages on a GPU
            ranks_of.setdefault(gpu, []).append(rank)
    return {gpu: ranks for gpu, ranks in ranks_of.items() if len(ranks) > 1}


def check_not_shared(gpus: Sequence[Sequence[str]]) -> None:
    """Rejects two ranks on one GPU.

    Args:
        gpus: `physical_gpus` of each rank.

    Raises:
        WorldError: two ranks have the same GPU; the message names them.
    """
    for gpu, ranks in ranks_by_shared_gpu(gpus).items():
        raise WorldError(
            f"ranks {ranks[0]} and {ranks[1]} use the same GPU ({gpu}), which NCCL supports only "
            f"for tests: assign each process its own GPU (set {argument('devices')} or start fewer "
            f"processes), set {setting('backend', 'gloo')}, or for a test that need not be fast "
            f"set {setting('share_gpus', True)}"
        )


def nccl_variables(version: tuple[int, ...], rank: int, is_one_host: bool) -> dict[str, str]:
    """Returns the environment variables with which NCCL lets ranks share a GPU.

    Args:
        version: NCCL's version.
        rank: the rank of this process.
        is_one_host: whether all ranks run on one host, where the loopback interface suffices.
    """
    if version[:2] >= _ALLOWS_SHARING:
        # the kernels of all ranks must fit on the GPU at once, because they wait for one another;
        # NVLS takes a GPU for one rank
        return {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MAX_CTAS": "1",
            "NCCL_NVLS_ENABLE": "0",
        }
    variables = {"NCCL_HOSTID": f"{socket.gethostname()}-{rank}", "NCCL_IB_DISABLE": "1"}
    return variables | ({"NCCL_SOCKET_IFNAME": "lo"} if is_one_host else {})
