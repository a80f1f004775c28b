"""What a closed world leaves behind: no thread of its messages that the process's end could cut."""

import os
import time

import torch
from torch import nn

from hybridtrain import HybridModel, World


def threads():
    return len(os.listdir("/proc/self/task"))


world = World.from_env(nb_part=2, devices="cpu", timeout_s=30)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model = HybridModel(net, world)  # its gradients have threads of their own, as long as it lives
model.train_step(torch.randn(2, 4), None, lambda output, _: output.mean())
assert world.gather(world.rank) == [0, 1]
working = threads()
world.close()
deadline = time.monotonic() + 10  # a thread that was joined may be listed for a moment
while threads() > working - 3 and time.monotonic() < deadline:
    time.sleep(0.01)
assert threads() <= working - 3, f"{threads()} threads of {working} are left"  # two and their loop
