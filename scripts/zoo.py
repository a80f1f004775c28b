"""Verifies models that others wrote: in stages they compute what they do unsplit.

These are all classification models of torchvision and a choice of those of transformers; the result
is a table, docs/models-table.md, whose counts are in docs/models.md too. The exit status is 1 if a
model cannot be split or differs by more than the order of additions explains. Run it in the
repository's root:

    python -m scripts.zoo                              # all of them, on the CPU
    python -m scripts.zoo --only resnet18 --stages 2   # some, to the terminal alone
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torchvision
import transformers

from hybridtrain import Verification
from hybridtrain.errors import SplitError
from hybridtrain.verification import TOLERANCES
from tests.support.zoo import (
    TRANSFORMERS,
    Case,
    in_stages,
    shares,
    torchvision_case,
    traced_by,
    transformers_case,
    verified,
)

TABLE = Path(__file__).resolve().parents[1] / "docs" / "models-table.md"


@dataclass
class Result:
    """The comparison of one model; the lists have an entry for each number of stages.

    Attributes:
        parameters: number of parameters.
        layers: number of layers that it can be cut between at first.
        traced: how these were found.
        shares: the largest stage's share of the parameters.
        found: the comparisons with the plain module.
        error: why it cannot be cut into more stages; the lists end there.
        crash: the exception that stopped the comparison.
        seconds: its duration.
    """

    parameters: int = 0
    layers: int = 0
    traced: str = ""
    shares: list[float] = field(default_factory=list)
    found: list[Verification] = field(default_factory=list)
    error: str = ""
    crash: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if the model trains in stages as it does unsplit, as far as it can be split."""
        return not self.crash and all(found.exact for found in self.found)


def check(case: Case, stages: Sequence[int], split: str) -> Result:
    """Verifies `case` in each number of stages."""
    result = Result(parameters=sum(p.numel() for p in case.net.parameters()))
    whole = in_stages(replace(case, net=copy.deepcopy(case.net)), 1, split)
    result.layers, result.traced = len(whole.stages[0].layers), traced_by(whole)
    del whole
    for count in stages:
        gc.collect()  # the model before this one
        own = replace(case, net=copy.deepcopy(case.net))
        try:
            model = in_stages(own, count, split)
        except SplitError as error:
            result.error = f"{count} stages: {' '.join(str(error).split())}"
            break
        result.found.append(verified(model, own))
        result.shares.append(max(shares(model)))
        del model
    return result


def run_alone(make: Callable[[str], Case], *args: Any) -> Result:
    """Returns the result of `timed_check`, run in another process, which frees its memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(timed_check, make, *args).result()
        except Exception as error:  # BrokenProcessPool: it died, perhaps for lack of memory
            traceback.print_exc()
            return Result(crash=f"{type(error).__name__}: {' '.join(str(error).split())}")


def timed_check(
    make: Callable[[str], Case], name: str, stages: Sequence[int], split: str
) -> Result:
    """Returns the comparison of the model `name`, and its duration."""
    torch.set_num_threads(1)  # their number decides in which order a kernel adds up
    begin = time.perf_counter()
    result = check(make(name), stages, split)
    result.seconds = time.perf_counter() - begin
    return result


def said(found: Verification) -> str:
    """Returns the largest difference, for a cell of the table."""
    if found.bitwise:
        return "bitwise"
    return f"{'' if found.exact else 'NOT EXACT: '}{found.worst.largest:.1e}"


def row(name: str, result: Result) -> list[str]:
    """Returns a row of the table."""
    cells = [name, f"{result.parameters:,}"]
    if result.crash:
        return [*cells, "-", "-", "-", result.crash]
    largest = ", ".join(f"{share:.0%}" for share in result.shares)
    compared = ", ".join(map(said, result.found)) or "-"
    if result.error:
        error = re.sub(r"\S*/site-packages/", "", result.error)  # not of this machine alone
        compared = f"{compared}; {error}".replace("|", "\\|")
    return [*cells, str(result.layers), result.traced, largest, compared]


def table(results: dict[str, Result], stages: Sequence[int]) -> list[str]:
    """Returns the results as lines of Markdown."""
    counts = ", ".join(map(str, stages))
    head = [
        "model", "parameters", "layers", "found by", f"largest of {counts} stages", "verified",
    ]  # fmt: skip
    lines = [head, ["---", *["---:"] * 2, *["---"] * 3]]
    lines += [row(name, result) for name, result in results.items()]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def page(kinds: dict[str, dict[str, Result]], stages: Sequence[int], split: str) -> str:
    """Returns the whole of docs/models-table.md."""
    counts = " and in ".join(map(str, stages))
    results = [result for kind in kinds.values() for result in kind.values()]
    comparisons = [found for result in results for found in result.found]
    not_all = [name for kind in kinds.values() for name, r in kind.items() if r.error]
    sections = [
        line
        for kind, found in kinds.items()
        for line in ("", f"## {kind}", "", *table(found, stages))
    ]
    return "\n".join([
        _PAGE.format(
            command=f"python -m scripts.zoo --split {split} --stages {','.join(map(str, stages))}",
            counts=counts,
            split=split,
            models=len(results),
            passed=sum(result.passed and not result.error for result in results),
            not_all=f"; not in every number of stages: {', '.join(not_all)} (the table says why)"
            if not_all
            else "",
            equal=sum(found.bitwise for found in comparisons),
            comparisons=len(comparisons),
            largest=f"{max((found.worst.largest for found in comparisons), default=0.0):.1e}",
            tolerance=f"more than {TOLERANCES['fp32']:.0e}",
            versions=f"PyTorch {torch.__version__}, torchvision {torchvision.__version__}, "
            f"transformers {transformers.__version__}",
        ),
        *sections,
        "",
    ])  # fmt: skip


_PAGE = """\
---
hide: [toc]  # wide tables
---

# Models that were tested: the table

Written by `{command}` ({versions}; one process on a CPU, fp32).

Each model is built with its constructor, randomly initialised, and verified in {counts} stages
(`split="{split}"`) by `HybridModel.verify`: two steps and two evaluations of five samples in two
micro-batches, of three samples and of two, beside the plain module with the same dropout masks.

Every entry of these tensors is compared: the losses and outputs of both micro-batches in training
and in evaluation, the gradients of all parameters, and all buffers after the step (running
statistics among them). *bitwise* means that no bit of them differs. A number is the largest
difference of a tensor relative to its largest entry; {tolerance} fails.

- **layers**: the number of layers that the model can be cut between at first. Layers that are too
  large for an even split are expanded further.
- **found by**: how these layers are found: by `torch.fx`, or, where it cannot follow the model's
  Python, by `torch.export`.
- **largest of N stages**: the share of the parameters that the largest stage has. It is far above
  1/N where one layer alone is that large (the first linear layer of AlexNet and VGG).

Images have 64 x 64 pixels, or the least that a model takes (Inception 299, MaxVit 224, ViT two
patches by two), since sizes do not change the structure. Auxiliary classifiers (GoogLeNet,
Inception) are part of the loss. The models of `transformers` are those of their configuration
classes with four layers of width 32; sentences are of different lengths, padded, with an attention
mask. [Where the last bits differ](models.md#where-the-last-bits-differ) says why.

{passed} of {models} models compute in stages what they do unsplit{not_all}.
{equal} of {comparisons} comparisons are bitwise, and the largest difference is {largest}."""


def names(only: Sequence[str]) -> Iterator[tuple[str, str, Callable[[str], Case]]]:
    """Returns the models that are asked for: section, name, and the function that builds one."""
    known = [
        ("torchvision", n, torchvision_case)
        for n in torchvision.models.list_models(torchvision.models)
    ]
    known += [("transformers", name, transformers_case) for name in TRANSFORMERS]
    unknown = set(only) - {name for _, name, _ in known}
    if unknown:
        sys.exit(f"no such model: {', '.join(sorted(unknown))}")
    return (model for model in known if not only or model[1] in only)


def main() -> None:
    """Checks the models that are asked for and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these models alone")
    parser.add_argument("--stages", default="2,4", help="numbers of stages (default: 2,4)")
    parser.add_argument("--split", default="size", help="pipeline.split (default: size)")
    parser.add_argument("--out", type=Path, help=f"where the table goes (docs/{TABLE.name})")
    args = parser.parse_args()
    stages = [int(count) for count in args.stages.split(",")]
    kinds: dict[str, dict[str, Result]] = {}
    for kind, name, make in names(args.only):
        result = run_alone(make, name, stages, args.split)
        kinds.setdefault(kind, {})[name] = result
        print(*row(name, result), f"{result.seconds:.0f} s", sep=" | ", flush=True)
        print(*(found for found in result.found if not found.exact), sep="\n", end="")
    out = args.out or (None if args.only else TABLE)
    if out is not None:
        out.write_text(page(kinds, stages, args.split), encoding="utf-8")
    sys.exit(not all(result.passed for kind in kinds.values() for result in kind.values()))


if __name__ == "__main__":
    main()
