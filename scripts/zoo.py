"""Verifies models that others wrote: in stages they compute what they do unsplit.

These are all classification models of torchvision and a choice of those of transformers; the result
is a table, docs/models-table.md, whose counts are in docs/models.md too. The exit status is 1 if a
model crashes or differs by more than the order of additions explains. Run it in the repository's
root:

    python -m scripts.zoo                              # all of them, on the CPU
    python -m scripts.zoo --only resnet18 --stages 2   # some, to the terminal alone
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
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
from hybridtrain.errors import UserError
from tests.support.zoo import (
    TRANSFORMERS,
    Case,
    in_stages,
    loss_fn,
    shares,
    torchvision_case,
    transformers_case,
    verified,
)

TABLE = Path(__file__).resolve().parents[1] / "docs" / "models-table.md"

LARGE = 30_000_000
"""Models with more parameters are verified in the first number of stages alone, to save time."""


@dataclass
class Result:
    """The comparison of one model; the lists have an entry for each number of stages.

    Attributes:
        parameters: number of parameters.
        layers: number of layers that all stages have together.
        shares: the largest stage's share of the parameters.
        comparisons: the comparisons with the plain module.
        refusal: why it cannot train, or be cut into more stages; the lists end there.
        crash: the exception that stopped the comparison.
        seconds: its duration.
    """

    parameters: int = 0
    layers: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    comparisons: list[Verification] = field(default_factory=list)
    refusal: str = ""
    crash: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if the model trains in stages as it does unsplit, as far as it can be split."""
        return not self.crash and not any(map(differs, self.comparisons))


def differs(comparison: Verification) -> bool:
    """True if a number differs, except for the loss of the whole batch.

    That loss is no mean over micro-batches for models that balance their routers.
    """
    return not comparison.bitwise and not comparison.exact


def check(case: Case, stages: Sequence[int], split: str) -> Result:
    """Verifies `case` in each number of stages; a large model only in the first."""
    result = Result(parameters=sum(p.numel() for p in case.net.parameters()))
    for count in stages[:1] if result.parameters > LARGE else stages:
        gc.collect()  # the model of the last round
        try:
            model = in_stages(replace(case, net=copy.deepcopy(case.net)), count, split)
            model.train_step(case.inputs, case.targets, loss_fn)  # refuses what cannot be exact
            comparison = verified(model, case)
        except UserError as error:
            result.refusal = f"refused in {count} stages: {' '.join(str(error).split())}"
            break
        result.comparisons.append(comparison)
        result.layers.append(sum(model.plan.counts))
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


def largest_difference(comparison: Verification) -> str:
    """Returns the largest difference, for a cell of the table."""
    if comparison.bitwise:
        return "bitwise"
    return f"{'NOT EXACT: ' if differs(comparison) else ''}{comparison.worst.largest:.1e}"


def row(name: str, result: Result) -> list[str]:
    """Returns a row of the table."""
    cells = [
        name,
        f"{result.parameters:,}",
        ", ".join(map(str, result.layers)) or "-",
        ", ".join(f"{share:.0%}" for share in result.shares) or "-",
    ]
    outcomes = [*map(largest_difference, result.comparisons), result.refusal, result.crash]
    cells.append(", ".join(filter(None, outcomes)).replace("|", "\\|"))
    return cells


def table(results: dict[str, Result]) -> list[str]:
    """Returns the results as lines of Markdown."""
    head = ["model", "parameters", "layers", "largest stage", "result"]
    lines = [head, ["---", *["---:"] * 3, "---"]]
    lines += [row(name, result) for name, result in results.items()]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def page(kinds: dict[str, dict[str, Result]], stages: Sequence[int], split: str) -> str:
    """Returns the whole of docs/models-table.md."""
    results = [result for kind in kinds.values() for result in kind.values()]
    comparisons = [comparison for result in results for comparison in result.comparisons]
    refused = [name for kind in kinds.values() for name, r in kind.items() if r.refusal]
    sections = [
        line for kind, rows in kinds.items() for line in ("", f"## {kind}", "", *table(rows))
    ]
    return "\n".join([
        _PAGE.format(
            command=f"python -m scripts.zoo --split {split} --stages {','.join(map(str, stages))}",
            counts=" and in ".join(map(str, stages)),
            first=stages[0],
            large=LARGE // 1_000_000,
            models=len(results),
            passed=sum(result.passed and not result.refusal for result in results),
            refused=f" Refused: {', '.join(refused)}; the table says why." if refused else "",
            equal=sum(comparison.bitwise for comparison in comparisons),
            comparisons=len(comparisons),
            versions=f"PyTorch {torch.__version__}, torchvision {torchvision.__version__}, "
            f"transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}",
        ),
        *sections,
        "",
    ])  # fmt: skip


_PAGE = """\
---
hide: [toc]  # wide tables
---

# Models that were tested: the table

Written by `{command}` ({versions}; one process on a CPU,
fp32). [Models that were tested](models.md) says how they are compared.

{passed} of {models} models compute in {counts} stages what they do unsplit, and
{equal} of {comparisons} comparisons are bitwise.{refused}
Models with more than {large} million parameters ran in {first} stages only.

- **layers**: the number of layers of all stages. Submodules that are too large for an even split
  are opened, so it may grow with the number of stages.
- **largest stage**: the share of the parameters in the largest stage. It is far above an even share
  if a single layer is that large (the first linear layer of AlexNet and VGG).
- **result**: *bitwise*, or the largest difference of a tensor relative to its largest entry."""


def names(only: Sequence[str]) -> Iterator[tuple[str, str, Callable[[str], Case]]]:
    """Returns the models that are asked for: section, name, and the function that builds one."""
    models = [
        ("torchvision", n, torchvision_case)
        for n in torchvision.models.list_models(torchvision.models)
    ]
    models += [("transformers", name, transformers_case) for name in TRANSFORMERS]
    unknown = set(only) - {name for _, name, _ in models}
    if unknown:
        sys.exit(f"no such model: {', '.join(sorted(unknown))}")
    return (model for model in models if not only or model[1] in only)


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
        print(*filter(differs, result.comparisons), sep="\n", end="")
    out = args.out or (None if args.only else TABLE)
    if out is not None:
        out.write_text(page(kinds, stages, args.split), encoding="utf-8")
    sys.exit(not all(result.passed for kind in kinds.values() for result in kind.values()))


if __name__ == "__main__":
    main()
