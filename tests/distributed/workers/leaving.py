"""What a world leaves behind when it is closed: no thread that the end of the process could cut."""

import os

from hybridtrain import World


def threads():
    return len(os.listdir("/proc/self/task"))


before = threads()
world = World.from_env(devices="cpu", timeout_s=30)
assert world.gather(world.rank) == [0, 1]
assert threads() > before
world.close()
assert threads() == before, f"{threads() - before} threads are left"
