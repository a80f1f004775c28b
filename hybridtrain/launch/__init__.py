"""The processes of a run: how they start, meet, watch each other, and report the first failure.

environment        reads the launcher's environment variables
meeting            the rendezvous of the processes
process_id         process IDs, to check whether a process of this host is alive
process_store      the store through which the processes exchange facts
activity           the record of what this process is doing
limits             time limits of what a process waits for while it joins or ends
watchdog           ends a run that fails or stalls, and names the process that caused it
failure            the first error, reported by all processes
error_file         the file in which a process tells torchrun why it failed
signals            signals that end a command, stop a run, or end a blocked process
notebook           runs a function in new processes
"""

from hybridtrain.launch.activity import LaneActivity, Phase, activity, end_process
from hybridtrain.launch.environment import Launch, detect, free_port, launcher_serves_store
from hybridtrain.launch.error_file import write_error_file
from hybridtrain.launch.failure import (
    exit_code,
    first_failure,
    in_one_line,
    store_gone,
    tell_uncaught_errors,
)
from hybridtrain.launch.limits import say, within
from hybridtrain.launch.meeting import check_interface, check_reachable, meet, tell_failure
from hybridtrain.launch.notebook import notebook_launcher
from hybridtrain.launch.process_id import (
    ProcessId,
    end_with_parent,
    has_ended,
    is_seen_from_here,
    this_process,
)
from hybridtrain.launch.process_store import EXIT_STALLED, Failure, ProcessStore
from hybridtrain.launch.signals import (
    ends_at_once,
    ignore_signals,
    raise_on_signals,
    restore_signals,
    second_signal_ends,
    signal_name,
    stop_on_signals,
)
from hybridtrain.launch.watchdog import Watchdog, current

__all__ = [
    "EXIT_STALLED",
    "Failure",
    "LaneActivity",
    "Launch",
    "Phase",
    "ProcessId",
    "ProcessStore",
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
    "first_failure",
    "free_port",
    "has_ended",
    "ignore_signals",
    "in_one_line",
    "is_seen_from_here",
    "launcher_serves_store",
    "meet",
    "notebook_launcher",
    "raise_on_signals",
    "restore_signals",
    "say",
    "second_signal_ends",
    "signal_name",
    "stop_on_signals",
    "store_gone",
    "tell_failure",
    "tell_uncaught_errors",
    "this_process",
    "within",
    "write_error_file",
]
