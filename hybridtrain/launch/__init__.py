"""Starting the processes of a run, and what they tell one another: life, signals, first errors.

environment        the launcher's variables
meeting            how the processes find each other
job                the processes, and what they tell one another in one store
activity           what this process does now
watchdog           ends a run that fails or stands still, and names the process that is the cause
failure            the first error, told in all processes
signals            what ends a command, stops a run, or ends a blocked process
notebook           a function in new processes
"""

from hybridtrain.launch.activity import LaneActivity, Phase, activity, end_process
from hybridtrain.launch.environment import Launch, detect, free_port
from hybridtrain.launch.failure import (
    exit_code,
    find_cause,
    in_one_line,
    store_gone,
    tell_uncaught_errors,
    write_error_file,
)
from hybridtrain.launch.job import (
    Failure,
    Job,
    ProcessId,
    end_with_parent,
    has_ended,
    is_seen_from_here,
    this_process,
)
from hybridtrain.launch.meeting import check_interface, check_reachable, meet, tell_failure
from hybridtrain.launch.notebook import notebook_launcher
from hybridtrain.launch.signals import (
    ends_at_once,
    ignore_signals,
    raise_on_signals,
    restore_signals,
    second_signal_ends,
    stop_on_signals,
)
from hybridtrain.launch.watchdog import Watchdog, current

__all__ = [
    "Failure",
    "Job",
    "LaneActivity",
    "Launch",
    "Phase",
    "ProcessId",
    "Watchdog",
    "activity",
    "check_interface",
    "check_reachable",
    "current",
    "detect",
    "end_process",
    "end_with_parent",
    "ends_at_once",
    "exit_code",
    "find_cause",
    "free_port",
    "has_ended",
    "ignore_signals",
    "in_one_line",
    "is_seen_from_here",
    "meet",
    "notebook_launcher",
    "raise_on_signals",
    "restore_signals",
    "second_signal_ends",
    "stop_on_signals",
    "store_gone",
    "tell_failure",
    "tell_uncaught_errors",
    "this_process",
    "write_error_file",
]
