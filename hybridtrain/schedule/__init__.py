"""Schedules as data: for every device, the ordered list of its actions.

    table        actions, spans, and the proof that an engine can execute a schedule
    named        the schedules that have a name: gpipe, 1f1b, zb-h1, zb-v
    make         any of them by its name, as the options give it
    search       a schedule for the costs of a model's own stages, by list_scheduling
    durations    these costs
    lines        a schedule as text, in a plan
    simulation   when each action runs, for given costs

Everything reads the one table: an engine executes it, `validate` proves that it cannot deadlock,
`peak_in_flight` counts the micro-batches that a stage keeps alive, `simulate` predicts when
everything runs. Nothing here needs torch.
"""

from hybridtrain.schedule.durations import Durations
from hybridtrain.schedule.lines import as_lines, from_lines
from hybridtrain.schedule.make import (
    NAMED,
    SCHEDULES,
    make_schedule,
    read_schedule,
    splits_backwards,
)
from hybridtrain.schedule.named import (
    forward_only,
    gpipe,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
)
from hybridtrain.schedule.placement import (
    STAGES_PER_DEVICE,
    Placement,
    place_of,
    placement_of,
    stages_at,
)
from hybridtrain.schedule.search import BOUND_OF, SEARCHES, is_too_long, most_held, search
from hybridtrain.schedule.simulation import (
    bubble_fraction,
    mean_backwards,
    mean_costs,
    predict,
    simulate,
)
from hybridtrain.schedule.table import (
    WORDS,
    Action,
    Schedule,
    Span,
    Spans,
    divided_backwards,
    peak_in_flight,
    peak_waiting,
    validate,
)

__all__ = [
    "BOUND_OF",
    "NAMED",
    "SCHEDULES",
    "SEARCHES",
    "STAGES_PER_DEVICE",
    "WORDS",
    "Action",
    "Durations",
    "Placement",
    "Schedule",
    "Span",
    "Spans",
    "as_lines",
    "bubble_fraction",
    "divided_backwards",
    "forward_only",
    "from_lines",
    "gpipe",
    "is_too_long",
    "make_schedule",
    "mean_backwards",
    "mean_costs",
    "most_held",
    "one_forward_one_backward",
    "peak_in_flight",
    "peak_waiting",
    "place_of",
    "placement_of",
    "predict",
    "read_schedule",
    "search",
    "simulate",
    "splits_backwards",
    "stages_at",
    "validate",
    "zero_bubble_h1",
    "zero_bubble_v",
]
