"""Both ranks, or one of them, fail in the second step. Run by test_failing.py."""

import sys

from support.compare import hybrid
from support.engine import Faulty
from support.nets import floats
from torch import nn
from torch.nn import functional as F


def main(who: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Faulty(), nn.Linear(4, 2))
    model = hybrid(net, 2, chunks=2)
    rank = model.world.rank
    batch = floats(5, 4, seed=rank), floats(5, 2, seed=10 + rank)
    model.train_step(*batch, F.mse_loss)
    if who in ("all", str(rank)):
        net[2].fail_at("forward", 0)
    model.train_step(*batch, F.mse_loss)
    print("the end was reached")


if __name__ == "__main__":
    main(sys.argv[1])
