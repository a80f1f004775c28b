"""The page: the table, what was measured, and a note for each cell that needs one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts.bench.exactness.cases import CASES
from scripts.bench.exactness.measure import Result
from scripts.bench.exactness.systems import SYSTEMS

# A cell has the result of the quick start and, where the documentation has one, of its remedy.
Cells = Mapping[tuple[str, str], Sequence[Result]]

INTRODUCTION = """\
---
hide: [toc]  # a wide table
---

# Exactness, measured

Each system trains the same small models for four optimizer steps (SGD with momentum, float64, CPU,
gloo). Unless the case says otherwise, there are 2 stages, 2 replicas, and 2 micro-batches per
replica. Each cell compares all final weights and buffers with the unsplit model's in plain
PyTorch. The unsplit model runs the same micro-batches in one process and minimizes the mean over
everything that the loss counts in a step.

- `bitwise`: every bit is equal.
- `1e-7`: the relative difference (the norm of the difference divided by the norm of the weights) is
  at most 1e-7; its value is in parentheses. It comes from a different order of summation or a
  different precision, not from a wrong gradient.
- `wrong by`: the norm of the difference, relative to the distance that training moved the weights.
- `refused`: the system raises an error, quoted in a note below the table.
- `crashes`: a process ends without a Python error.
- `hangs`: the processes are still running at the deadline.
- `other draws`: the run draws other dropout masks than the run of the case `dropout`. A note says
  whether its result is right for these masks.
- `n/a`: not applicable.

Each system is used as its documentation describes. If the documentation also has a remedy for the
case, the cell shows the result without it and, after the arrow, with it; a note names the remedy.

For dropout, the unsplit model replays the masks that the system drew in its forward. A
recomputation that draws a different mask is therefore wrong.

"""


WHY = """\
## Why cells are wrong

- Padded labels and class weights: the mean of the micro-batch and replica means is not the mean
  over the labels that count.
- Short last batch: the samplers of Fabric and Accelerate repeat samples until all replicas have the
  same number, and a smaller micro-batch gets the same weight as a full one.
- Batch norm in recomputed layers: the recomputation updates the running statistics a second time.
- Accumulation in torch.distributed.pipelining: each step divides all accumulated gradients by the
  number of micro-batches, including the gradients of earlier batches.
- Gradient clipping: torch.distributed.pipelining clips each stage by its own norm; DeepSpeed's norm
  covers only the gradients of the first stage.
- Tied embeddings in torch.distributed.pipelining: each stage trains its own copy of the weight.
"""


def page(cells: Cells, footer: str) -> str:
    """Returns the page in Markdown.

    Args:
        cells: the results, by case and system.
        footer: the command, the versions and the machine.
    """
    systems = list(dict.fromkeys(system for _, system in cells))
    cases = list(dict.fromkeys(case for case, _ in cells))
    notes: list[str] = []
    rows = [["case", *(SYSTEMS[system].title for system in systems)]]
    for case in cases:
        texts = [_cell(case, system, cells[case, system], notes) for system in systems]
        rows.append([CASES[case].name, *texts])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    uses = [
        f"- **{SYSTEMS[system].title}** ({SYSTEMS[system].package} {SYSTEMS[system].version}): "
        f"{SYSTEMS[system].description}"
        for system in systems
    ]
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    parts = [
        INTRODUCTION + "\n".join(lines),
        "## Notes\n\n" + "\n".join(numbered) if numbered else "",
        WHY.rstrip(),
        "## How each system is used\n\n" + "\n".join(uses),
        "## How it was measured\n\n" + footer,
    ]
    return "\n\n".join(filter(None, parts)).rstrip() + "\n"


def _cell(case: str, system: str, results: Sequence[Result], notes: list[str]) -> str:
    texts = []
    for number, result in enumerate(results):
        note = result.note
        if number:
            remedy = SYSTEMS[system].remedies[case]
            note = f"With {remedy}. {note}".strip()
        marks = ""
        if note:
            if note not in notes:
                notes.append(note)
            marks = f" [{notes.index(note) + 1}](#notes)"
        text = f"**{result.verdict}**" if result.verdict == "bitwise" else result.verdict
        texts.append(text + marks)
    return " → ".join(texts)
