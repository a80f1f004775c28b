"""AWS's example scripts, with the import changed or unchanged, against a plain loop."""

from __future__ import annotations

import sys
from pathlib import Path

from support import aws
from support.launch import Cells

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}

cells = Cells()


def options(**values):
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


GPT = {**PIPELINE, "checkpoint-dir": "checkpoints"}
TOLERANCE = 5e-5  # of what Adam makes of differences in the last bit


def folders(world, name, write):
    """One for the pipeline, one of this process for the plain loop; both with the data."""
    shared, own = (Path(sys.argv[1]) / name / part for part in ("all", f"rank{world.rank}"))
    for folder in (shared, own) if world.is_main else (own,):
        (folder / "checkpoints").mkdir(parents=True)
        write(folder)
    world.gather(None)
    return shared, own


def check(world, title, name, write, arguments, more=None, aliases=False, exact=True, **parameters):
    """Runs a script, goes on from its checkpoint with `more`, and compares with a plain loop.

    Losses are equal bitwise if they are to be `exact` and there is one replica. A tied weight's
    gradient is the sum of those of its stages, and an average over replicas has another order.
    """
    loss_tolerance = 0.0 if exact and world.size == 2 else TOLERANCE
    shared, own = folders(world, title, write)
    parameters = {**PIPELINE, **parameters}
    found = aws.run(name, shared, arguments, parameters, aliases=aliases)
    start = found.start
    if more is not None:
        resumed = aws.run(name, shared, [*arguments, *more], parameters, aliases=aliases)
        found.losses += resumed.losses
        found.weights = resumed.weights
        arguments = [*arguments, *more[:2]]
    expected = aws.plain(name, own, arguments, PIPELINE["microbatches"], start)
    assert len(found.losses) == len(expected.losses) >= 4
    assert found.weights.keys() == expected.weights.keys()
    moved = max(float((start[n] - t).abs().max()) for n, t in expected.weights.items())
    assert moved > 1e-3
    by_loss = max(float((a - b).abs()) for a, b in zip(found.losses, expected.losses, strict=True))
    by_weight = max(float((found.weights[n] - t).abs().max()) for n, t in expected.weights.items())
    print(f"{title}, {world.size} processes: losses {by_loss:.1e}, weights {by_weight:.1e}")
    assert by_loss <= loss_tolerance
    assert by_weight <= TOLERANCE


@cells.add("GPT-2: train_gpt_simple.py", thorough=True)
def _(world):
    check(
        world,
        "gpt2",
        "train_gpt_simple",
        aws.write_tokens,
        options(**GPT, save_final_full_model=1),
        options(max_steps=6, load_partial=1),
        exact=False,
    )


@cells.add("GPT-2: train_gpt_simple.py with a manual partition", thorough=True)
def _(world):
    check(
        world,
        "gpt2-manual",
        "train_gpt_simple",
        aws.write_tokens,
        options(**GPT, max_steps=2, num_layers=2, manual_partition=1, logits_output="logits.pt"),
        options(max_steps=4, load_partial=1),
        exact=False,
    )


@cells.add("GPT-J: train_gptj_simple.py", thorough=True)
def _(world):
    check(
        world,
        "gptj",
        "train_gptj_simple",
        aws.write_tokens,
        options(**GPT, num_layers=2, manual_partition=1, gather_if_shard=0),
        options(max_steps=6, load_partial=1),
    )


@cells.add("GPT-Neo: train_gptneo_simple.py", thorough=True)
def _(world):
    check(
        world,
        "gptneo",
        "train_gptneo_simple",
        aws.write_tokens,
        options(**GPT),
        options(max_steps=6, load_partial=1),
        exact=False,  # its embedding is tied, and stages add its gradients in another order
    )


@cells.add("BERT: sagemaker_smp_pretrain.py, unchanged", thorough=True)
def _(world):
    files = {"input_dir": "input", "config_file": "config.json", "output_dir": "output"}
    check(
        world,
        "bert",
        "sagemaker_smp_pretrain",
        aws.write_sentences,
        options(**files),
        aliases=True,
        hybridtrain={"broadcast_batch": True},  # each process shuffles with a seed of its own
    )


@cells.add("MNIST: pt_mnist.py, unchanged", thorough=True)
def _(world):
    check(world, "mnist", "pt_mnist", aws.write_digits, [], aliases=True)


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
