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
gloo), with 2 stages, 2 replicas, and 2 micro-batches per replica unless the case says otherwise. A
cell compares all weights and buffers at the end with those of the unsplit model in plain PyTorch,
which runs the same micro-batches in one process and minimizes the mean over all that the loss
counts in a step.

- `bitwise`: every bit is equal.
- `1e-7`: the difference is at most 1e-7 of the weights, and in brackets how large it is (its norm
  over theirs). It comes from another order of additions or another precision, not from a wrong
  gradient.
- `wrong by`: the difference, relative to the distance that training has moved the weights.
- `refused`: the system raises an error, which a note below the table quotes.
- `crashes`: a process ends without an error in Python.
- `hangs`: the processes are still running after the deadline.
- `other draws`: the run draws other dropout masks than the run of the case `dropout`. A note says
  whether it is right with the masks that it draws.
- `n/a`: not applicable.

Each system is used as its documentation says. Where the documentation also has an answer for the
case, the cell shows the result without it and, after the arrow, with it; a note says what it is.

Dropout is compared with the masks that the system has drawn in its forward: the unsplit model
replays them. A recomputation that draws another mask is therefore wrong.

"""


WHY = """\
## Why a cell is wrong

- Padded labels and class weights: the mean of the means of micro-batches and replicas is not the
  mean over the labels that count.
- Short last batch: the samplers of Fabric and Accelerate repeat samples until all replicas have
  equally many, and a smaller micro-batch weighs as much as a full one.
- Batch norm in recomputed layers: the recomputation updates the running statistics again.
- Accumulation in torch.distributed.pipelining: each step divides all gradients by the number of
  micro-batches, including those of earlier batches.
- Gradient clipping: each stage of torch.distributed.pipelining is clipped by its own norm;
  DeepSpeed's norm has the gradients of the first stage alone.
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
