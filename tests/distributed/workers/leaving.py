"""A closed world leaves no thread of its messages that the end of the process could cut."""

import os
import time

from support.compare import hybrid, mean_loss
from support.nets import floats
from torch import nn

from hybridtrain import HybridModel
from hybridtrain.errors import WorldError


def threads():
    return len(os.listdir("/proc/self/task"))


# the threads that average its gradients live as long as the model
model = hybrid(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
world = model.world
model.train_step(floats(2), None, mean_loss)
assert world.gather(world.rank) == [0, 1]
working = threads()
world.close()
deadline = time.monotonic() + 10  # a thread that was joined may be listed for a moment
while threads() > working - 3 and time.monotonic() < deadline:
    time.sleep(0.01)
assert threads() <= working - 3, f"{threads()} threads of {working} are left"  # two and their loop

try:
    HybridModel(nn.Linear(6, 6), world)
    raise AssertionError("a closed world was used")
except WorldError as error:
    assert "this World is closed" in str(error)  # noqa: PT017
