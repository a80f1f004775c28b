"""Draws docs/assets/timelines.png: a step of one GPT in three orders, as it was measured.

    python scripts/timelines.py [FILE]

Two stages on the CPU, a core each: device after device, which is a pipeline of one micro-batch, and
two schedules. Of several steps the one with the median time is drawn. The orders take turns.
"""

import sys
from pathlib import Path
from statistics import median_low

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrain import HybridModel, World
from hybridtrain.models import gpt
from hybridtrain.observe import draw_timelines
from hybridtrain.schedule import Spans, length

FILE = Path(__file__).parents[1] / "docs" / "assets" / "timelines.png"
ORDERS = {
    "device after device": ("gpipe", 1, 1), "1F1B": ("1f1b", 1, 4), "zb-v": ("zb-v", 2, 4)
}  # fmt: skip
"""The schedule, the stages of a device, and the number of micro-batches."""
STEPS, WARM_UP, SAMPLES, VOCABULARY, LENGTH = 25, 5, 16, 256, 128


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Measures, and writes the picture."""
    torch.set_num_threads(1)
    world = World.from_env(nb_part=2, devices="cpu")
    models = {}
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1))
    for name, (schedule, stages, chunks) in ORDERS.items():
        torch.manual_seed(0)
        net = gpt(VOCABULARY, LENGTH, n_layer=8, d_model=256, n_head=4)
        models[name] = HybridModel(
            net, world, chunks=chunks, schedule=schedule, stages_per_device=stages, split="time",
            example_inputs=tokens[:, :-1],
        )  # fmt: skip
    measured: dict[str, list[Spans]] = {name: [] for name in models}
    for step in range(STEPS):
        for name, model in models.items():
            out = model.train_step(tokens[:, :-1], tokens[:, 1:], loss_fn, timeline=True)
            model.zero_grad()
            if step >= WARM_UP and out.timeline is not None:
                measured[name].append(out.timeline.spans())
    shown = {}
    for name, steps in measured.items():
        typical = median_low([length(spans) for spans in steps])
        shown[name] = next(spans for spans in steps if length(spans) == typical)
        print(f"{name}: {typical * 1e3:.1f} ms, the median of {len(steps)} steps")
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    title = "One step of a GPT with 8 blocks on two devices; the pipelines have 4 micro-batches"
    draw_timelines(shown, title).save(path, optimize=True)
    world.close()


if __name__ == "__main__":
    main()
