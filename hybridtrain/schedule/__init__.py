"""Schedules as data: for every device, the ordered list of its actions.

    table        actions, spans, the device of each stage, and the check that an engine can
                 execute a schedule
    registry     schedules by name, with their properties; `@schedule` registers one
    named        the schedules gpipe, 1f1b, zb-h1 and zb-v
    controllable_memory  v-half and v-min, which use less memory than 1f1b
    files        tables in files: CSV as in torch.distributed.pipelining, and plans
    memory       the micro-batches that a device holds, and its peak moments
    offload      when activations leave their device, and when they come back
    simulation   simulated spans of the actions, for given costs
    account      the time breakdown of a measured step
    waits        the waits of its devices with their causes, and its critical path

All consumers read the same table: an engine executes it, `validate` proves that it cannot deadlock,
`peak_in_flight` counts the micro-batches that a stage keeps alive, and `simulate` predicts the time
of each action. This package does not need torch.
"""

from hybridtrain.schedule.account import (
    COMPUTING,
    Account,
    account_of,
    mean_delays,
)
from hybridtrain.schedule.controllable_memory import v_half, v_min
from hybridtrain.schedule.files import actions_as_text, is_file, read_schedule, write_csv
from hybridtrain.schedule.memory import (
    Moment,
    fullest_moments,
    peak_in_flight,
)
from hybridtrain.schedule.named import (
    forward_only,
    gpipe,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
)
from hybridtrain.schedule.offload import (
    Copies,
    Held,
    Offloading,
    offload_copies,
    offloading_on,
    offloads_anything,
)
from hybridtrain.schedule.registry import (
    RegisteredSchedule,
    is_periodic,
    make_schedule,
    register_table,
    registered,
    schedule,
    schedule_names,
)
from hybridtrain.schedule.simulation import (
    CopyTimes,
    Durations,
    bubble_fraction,
    length,
    mean_backwards,
    mean_costs,
    predict,
    simulate,
    spans_for,
    window,
)
from hybridtrain.schedule.table import (
    WORDS,
    Action,
    ActionKind,
    CopySpan,
    Placement,
    Schedule,
    Span,
    Spans,
    SpansWithCopies,
    backward_only,
    copies_of,
    divided_backwards,
    place_of,
    receiver_of,
    stages_at,
    validate,
)
from hybridtrain.schedule.waits import Wait, WaitFor, critical_path, waits

__all__ = [
    "COMPUTING",
    "WORDS",
    "Account",
    "Action",
    "ActionKind",
    "Copies",
    "CopySpan",
    "CopyTimes",
    "Durations",
    "Held",
    "Moment",
    "Offloading",
    "Placement",
    "RegisteredSchedule",
    "Schedule",
    "Span",
    "Spans",
    "SpansWithCopies",
    "Wait",
    "WaitFor",
    "account_of",
    "actions_as_text",
    "backward_only",
    "bubble_fraction",
    "copies_of",
    "critical_path",
    "divided_backwards",
    "forward_only",
    "fullest_moments",
    "gpipe",
    "is_file",
    "is_periodic",
    "length",
    "make_schedule",
    "mean_backwards",
    "mean_costs",
    "mean_delays",
    "offload_copies",
    "offloading_on",
    "offloads_anything",
    "one_forward_one_backward",
    "peak_in_flight",
    "place_of",
    "predict",
    "read_schedule",
    "receiver_of",
    "register_table",
    "registered",
    "schedule",
    "schedule_names",
    "simulate",
    "spans_for",
    "stages_at",
    "v_half",
    "v_min",
    "validate",
    "waits",
    "window",
    "write_csv",
    "zero_bubble_h1",
    "zero_bubble_v",
]
