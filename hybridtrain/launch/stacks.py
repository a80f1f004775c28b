"""The stacks of this process: written to a file, and read to see whether it waits for others."""

from __future__ import annotations

import faulthandler
import sys
import threading
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from hybridtrain.launch.activity import Activity
from hybridtrain.launch.job import Report
from hybridtrain.schedule import WORDS

_TORCH = Path(str(getattr(find_spec("torch"), "origin", ""))).parent  # without an import
_LIBRARY = Path(__file__).parents[1]
_STDLIB = Path(threading.__file__).parent

# In these the innermost frame waits for another process, or for another thread that is looked at
# by itself.
_WAITS = (
    *(str(_LIBRARY / name) for name in ("world.py", "launch", "pipeline/engines")),
    str(_TORCH / "distributed"),
)
# Here it may: a backward ends with the all-reduce of a stage, without any frame that says so.
_MAY_WAIT = (
    *(str(_LIBRARY / name) for name in ("pipeline", "_torch_private.py", "checkpoint/state.py")),
    str(_TORCH / "nn/parallel"),
    str(_TORCH / "autograd"),
)


def write_stacks(path: Path) -> None:
    """Writes the stacks of all threads of this process to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A new file: a link that is there is not followed, and one that comes in between is an error.
    path.unlink(missing_ok=True)
    with path.open("x") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def report(activity: Activity) -> Report:
    """Says what this process is doing, and whether it seems to wait for other processes."""
    frames = sys._current_frames()
    main = threading.main_thread()
    best: tuple[int, str, FrameType | None] = (0, "", None)
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or not (thread is main or thread.name.startswith("stage-")):
            continue
        blame, lane = _blame(frame), _lane_of(thread, frame)
        action = ""
        if lane is not None and lane < len(activity.lanes):
            record = activity.lanes[lane]
            if record.waiting:
                blame = 0
            if record.action is not None:
                action = describe(record.action)
        elif thread is not main:
            blame = 0  # a lane that has ended
        if best[2] is None or (blame, bool(action)) > (best[0], bool(best[1])):
            best = blame, action, frame
    blame, action, innermost = best
    phase = activity.phase or "no phase of training"
    what = f"in the {action} ({phase})" if action else f"in {phase!r}"
    where = _user_frame(innermost)
    if where:
        what += f", {where}"
    # micro-batches done count within a step: between equal steps, the one behind is the cause
    return Report(what, blame, activity.steps)


def stands_in_debugger() -> bool:
    """Returns whether a thread of this process is in a debugger, where nothing has to move."""
    return any(
        frame.f_code.co_filename.endswith("bdb.py") or "pydevd" in frame.f_code.co_filename
        for innermost in sys._current_frames().values()
        for frame in _frames(innermost)
    )


def summary(activity: Activity) -> str:
    """Says in a few words what the training loop and the busy lanes are doing."""
    phase = activity.phase or "no phase of training"
    busy = [lane.action for lane in activity.lanes if lane.action and not lane.waiting]
    doing = " and the ".join(describe(action) for action in busy)
    return f"in the {doing} ({phase})" if doing else f"in {phase!r}"


def describe(action: tuple[str, int, int]) -> str:
    """Returns a schedule's action in words."""
    kind, stage, microbatch = action
    return f"{WORDS[kind]} of micro-batch {microbatch} on stage {stage}"


def _blame(frame: FrameType) -> int:
    """Returns 0 if the innermost frame waits for others, 1 if it may, 2 if it is busy."""
    innermost: FrameType | None = frame
    # queues, conditions and context managers wait for whoever calls them
    while innermost is not None and innermost.f_code.co_filename.startswith(
        (str(_STDLIB / "threading.py"), str(_STDLIB / "queue.py"), str(_STDLIB / "contextlib.py"))
    ):
        innermost = innermost.f_back
    path = "" if innermost is None else innermost.f_code.co_filename
    if path.startswith(_WAITS):
        return 0
    return 1 if path.startswith(_MAY_WAIT) else 2


def _lane_of(thread: threading.Thread, frame: FrameType) -> int | None:
    """Returns the record of a thread that executes actions; a single one may be the caller's."""
    running = any(each.f_code.co_name == "run_actions" for each in _frames(frame))
    if not running:
        return None
    return int(thread.name[6:]) if thread.name.startswith("stage-") else 0


def _user_frame(frame: FrameType | None) -> str:
    """Returns where the innermost frame of the user's code is, or nothing."""
    for each in _frames(frame):
        path = each.f_code.co_filename
        if not path.startswith((str(_LIBRARY), str(_TORCH), str(_STDLIB), "<")):
            summary = traceback.extract_stack(each, limit=1)[0]
            return f'File "{summary.filename}", line {summary.lineno}, in {summary.name}'
    return ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
