"""Checkpoint directories that survive a killed process, a power cut and a flipped bit.

A checkpoint is a directory of files, each filled by a function of the caller's. It is complete or
absent: how its names change is drawn in `directory`. Readers never repair anything; the next save
removes what a killed run left behind.

`best.json` names the best one, which stays whatever `keep` says. With `background`, a thread does
all of this, one save at a time.

One run at a time saves into a root: its rank 0 alone, or all of its processes together, each its
own files (`joint_save`). Any number of processes may read.
"""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from hybridtrain._base.files import make_directory, sync_directory
from hybridtrain.checkpoint.directory import (
    TEMPORARY,
    Best,
    generations,
    path_of,
    published,
    read_best,
    remove,
    remove_steps,
    rename_into_place,
    tidy,
    write_best,
)
from hybridtrain.checkpoint.host_copies import HostCopies
from hybridtrain.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    FileWriter,
    check_file_name,
    read_manifest,
    render_manifest,
    step_of,
    verify,
    write_file,
)
from hybridtrain.checkpoint.shared_files import hosts_without
from hybridtrain.errors import CheckpointError, argument, check_choice, phrase, setting
from hybridtrain.launch import activity
from hybridtrain.world import World

__all__ = ["CheckpointStore", "NoSpaceError", "step_of", "verify"]

WRITERS = ("auto", "rank0", "all")
"""The choices of `CheckpointStore(writers=...)`."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = logging.getLogger(__name__)


class NoSpaceError(CheckpointError):
    """A checkpoint was not saved because the disk is full; a later save may succeed."""


class CheckpointStore:
    """The checkpoints of one run: `root/step_00000100/`, `root/step_00000200/`, ...

    Args:
        root: their directory; made by the first `save`.
        keep: how many of the newest stay on disk, beside the best; None: all. A save needs space
            for one more.
        background: `save` returns at once, and a thread writes the files. One save at a time: the
            next one waits for it, and so does `wait`.
        writers: which processes of a run write, for `save_checkpoint`. "all": each its share of the
            state, into the same directory, which all must see. "rank0": rank 0 alone, which asks
            the others for what it does not have, one tensor at a time. "auto": rank 0 if it has
            everything, else all if they see the directory, else rank 0.

    Attributes:
        host_copies: of the state that a save in the background writes; the next one takes their
            memory.
    """

    def __init__(
        self,
        root: str | Path,
        keep: int | None = None,
        background: bool = False,
        writers: str = "auto",
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"{setting('keep', keep)} must be at least 1, or None to keep all"
            )
        check_choice("writers", writers, WRITERS)
        self.root = Path(root)
        self.keep = keep
        self.background = background
        self.writers = writers
        self.host_copies = HostCopies()
        self._seen_by_all: bool | None = None  # not tried yet
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failed_step = -1
        self._lock = threading.RLock()  # of the directory, and of the next line
        self._unsaved_best: Best | None = None

    def save(
        self,
        step: int,
        files: Mapping[str, FileWriter],
        *,
        prune: bool = True,
        background: bool | None = None,
    ) -> Path:
        """Publishes the checkpoint of `step`, with all `files`; returns its directory.

        When this returns, the checkpoint is on disk, unless the store saves in the `background`.
        One of the same step is replaced; at every moment one of the two can be loaded. Then, with
        `keep`, the oldest are removed, but never later steps than this one, and never the best.

        Args:
            step: the optimizer steps done.
            files: by name the function that writes each, into a binary file that can only be
                appended to. In the background they run while training goes on, so that they must
                write copies.
            prune: False to remove no older checkpoint this time.
            background: in place of the store's own, for this save.

        Raises:
            NoSpaceError: the disk is full; the older checkpoints are unchanged.
            CheckpointError: the files cannot be written (no permission); the older checkpoints are
                unchanged. In the background this, and whatever else a function of `files` raises,
                is raised by the next `save` or `wait`. Then nothing is saved by that call.
        """
        for name in files:
            check_file_name(name)

        def save() -> Path:
            temporary = self.begin(step)
            try:
                entries = self.write(step, temporary, files)
                return self.publish(step, temporary, entries, prune)
            finally:
                if temporary.is_dir():  # not published
                    shutil.rmtree(temporary, ignore_errors=True)

        return self.run(step, save, background)

    def run(self, step: int, save: Callable[[], Path], background: bool | None = None) -> Path:
        """Runs `save`, here or in the background, when the last one has ended.

        Args:
            step: the optimizer steps done.
            save: makes a checkpoint of `begin`, `write` and `publish`; returns its directory.
            background: see `save`.

        Returns:
            the directory; of a save in the background the one that it will have.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        self.wait()

        def run() -> Path:
            with activity.saving():
                return save()

        if not (self.background if background is None else background):
            return run()
        # not a daemon: the interpreter waits for it at exit
        self._thread = threading.Thread(
            target=self._in_background, args=(step, run), name="checkpoint", daemon=False
        )
        self._thread.start()
        return path_of(self.root, step)

    def is_seen_by_all(self, world: World, again: bool = False) -> bool:
        """Returns whether all processes see the directory; a collective call.

        Args:
            world: the processes.
            again: try it, also if that was done before.

        Raises:
            CheckpointError: some do not, and `writers` is "all"; names them, and both ways out.
        """
        if self._seen_by_all is None or again:
            without = ", ".join(hosts_without(self.root, world))
            if without and self.writers == "all":
                raise CheckpointError(
                    f"{setting('writers', 'all')} needs a directory that all processes see, and "
                    f"{self.root} of rank 0 is not seen by {without}: put it on a file system "
                    f"that all nodes share (output_dir=), or set {setting('writers', 'rank0')}, "
                    "with which rank 0 gathers and writes everything"
                )
            if without and world.is_main:
                _log.info(
                    "rank 0 gathers and writes the checkpoints: %s is not seen by %s",
                    self.root, without,
                )  # fmt: skip
            self._seen_by_all = not without
        return self._seen_by_all

    def wait(self) -> None:
        """Returns when no save is under way.

        Raises:
            Exception: the last save has failed in the background; raised once.
        """
        if (thread := self._thread) is not None:
            thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            with self._lock:
                if self._unsaved_best is not None and self._unsaved_best.step == self._failed_step:
                    self._unsaved_best = None
            try:
                raise failure
            finally:
                # its traceback would hold it, and with it the model, until the next collection
                del failure

    def mark_best(self, step: int, value: float, criterion: str | None = None) -> None:
        """Marks the checkpoint of `step` as the best, by `value`, until another is marked.

        It is never pruned. If the checkpoint is not saved yet, its `save` marks it, and until then
        the best one before stays marked: at every moment there is a best one to load. If that save
        fails, the mark is dropped.

        Args:
            step: the optimizer steps done.
            value: what it was chosen by.
            criterion: what `value` is of, such as "min loss"; kept beside it.

        Raises:
            CheckpointError: the mark cannot be written.
        """
        with self._lock:
            best = Best(step, float(value), criterion)
            if step not in self.steps():
                self._unsaved_best = best
                return
            self._unsaved_best = None
            try:
                write_best(self.root, best)
            except OSError as error:
                raise CheckpointError(
                    f"cannot mark step {step} as the best in {self.root}: {error}"
                ) from error

    def best_mark(self) -> Best | None:
        """Returns the step, value and criterion of the best checkpoint, if one is marked.

        Raises:
            CheckpointError: the mark is damaged.
        """
        with self._lock:
            return self._unsaved_best or read_best(self.root)

    def best(self) -> Path | None:
        """Returns the checkpoint that is marked as the best, or None if none is.

        Raises:
            CheckpointError: the mark is damaged, or the marked checkpoint is missing or damaged.
        """
        with self._lock:
            mark = read_best(self.root)
            if mark is None:
                return None
            found = generations(self.root, mark.step)
        path = found[-1] if found else path_of(self.root, mark.step)
        verify(path)
        return path

    def newest_up_to(self, step: int) -> Path | None:
        """Returns the newest checkpoint that is not of a later step; it may be damaged."""
        paths = [path for other, _, path in published(self.root) if other <= step]
        return paths[-1] if paths else None

    def steps(self) -> list[int]:
        """Returns the steps of the published checkpoints, ascending; they may be damaged."""
        return sorted({step for step, _, _ in published(self.root)})

    def newest(self) -> Path | None:
        """Returns the newest intact checkpoint, or None if there are no checkpoints.

        Reads every byte of it. A damaged one is skipped with a warning.

        Raises:
            CheckpointError: all are damaged; starting from scratch is the user's decision.
        """
        while found := published(self.root):
            for _, _, path in reversed(found):
                try:
                    verify(path)
                except CheckpointError as error:
                    _log.warning("skipping a damaged checkpoint: %s", error)
                    reason = error
                else:
                    return path
            if found == published(self.root):  # no run has replaced them meanwhile
                names = ", ".join(path.name for _, _, path in found)
                raise CheckpointError(
                    f"none of the checkpoints in {self.root} is intact ({names}): {reason}. "
                    f"Restore one from a copy, or {phrase('start a new run in another directory')}"
                )
        return None

    def begin(self, step: int) -> Path:
        """Removes what earlier saves have left, and makes the directory for the files of `step`.

        This, `write` and `publish` are the parts of a save, for `joint_save`.

        Raises:
            CheckpointError: as of `save`; so of `write` and `publish`.
        """
        temporary = self.root / f"{TEMPORARY}{step}-{uuid4().hex}"
        with self._os_errors(step, temporary):
            make_directory(self.root)
            # first, because on a full disk this is the space that is missing
            with self._lock:
                remove(self.root, list(self.root.glob(f"{TEMPORARY}*")))
            temporary.mkdir()
        return temporary

    def write(
        self, step: int, temporary: Path, files: Mapping[str, FileWriter]
    ) -> dict[str, dict[str, Any]]:
        """Writes files; they are on disk when this returns their entries of the manifest."""
        with self._os_errors(step, temporary):
            return {name: write_file(temporary / name, write) for name, write in files.items()}

    def publish(
        self, step: int, temporary: Path, entries: Mapping[str, dict[str, Any]], prune: bool
    ) -> Path:
        """Gives a directory with all files its name; then marks the best, and prunes."""
        with self._os_errors(step, temporary):
            manifest = render_manifest({"format": FORMAT, "step": step, "files": dict(entries)})
            # all files are on disk by now; the manifest and the names must be, before the rename
            write_file(temporary / MANIFEST, lambda file: file.write(manifest))
            sync_directory(temporary)
            with self._lock:
                path = rename_into_place(self.root, temporary, step)

        # the checkpoint is on disk: errors from here on must not look like a failed save
        with self._lock:
            try:
                tidy(self.root, step, path)
                # the mark before the prune: the best one before may go only then
                if (best := self._unsaved_best) is not None and best.step == step:
                    self.mark_best(step, best.value, best.criterion)
                if prune:
                    self._prune(step)
            except (OSError, CheckpointError) as error:
                _log.warning("%s is saved, but not all is tidy: %s", path, error)
            return generations(self.root, step)[-1]

    def _in_background(self, step: int, run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:
            # said now as well, for a run that is killed before its next save
            _log.error("the checkpoint of step %d was not saved: %s", step, error)
            self._failure, self._failed_step = error, step

    def _prune(self, last: int) -> None:
        """Removes the oldest checkpoints, so that `keep` of those up to step `last` stay.

        Later steps stay: after a return to an earlier checkpoint, one of them may be the newest
        intact one. With a damaged mark nothing is removed, since the best is not known.
        """
        if self.keep is None:
            return
        best = read_best(self.root)
        surplus = [step for step in self.steps() if step <= last][: -self.keep]
        if best is not None and best.step in surplus:
            surplus.remove(best.step)
        remove_steps(self.root, surplus)

    @contextmanager
    def _os_errors(self, step: int, temporary: Path) -> Iterator[None]:
        """Raises an `OSError` of the block as the `CheckpointError` that says what to do."""
        try:
            yield
        except OSError as error:
            try:
                # the best guess: the checkpoints of a run have nearly the same size
                files = read_manifest(published(self.root)[-1][2])["files"]
                previous = sum(entry["size"] for entry in files.values())
            except (CheckpointError, IndexError):
                previous = 0
            raise _save_error(temporary, step, error, previous) from error


def _save_error(temporary: Path, step: int, error: OSError, previous_bytes: int) -> CheckpointError:
    """Returns the error of a save that could not write or rename a file.

    Args:
        temporary: the directory that was written to; it may be missing.
        step: of the checkpoint.
        error: what the system says.
        previous_bytes: the size of the newest checkpoint, which the next ones are about as large
            as; 0 if there is none.
    """
    root = temporary.parent
    message = f"cannot save the checkpoint of step {step} in {root}: {error}"
    if error.errno not in _NO_SPACE:
        return CheckpointError(message)
    written = sum(file.stat().st_size for file in temporary.glob("*"))
    existing = next(path for path in (root, *root.parents) if path.is_dir())
    free = written + shutil.disk_usage(existing).free
    return NoSpaceError(
        f"{message}. It needs {max(written, previous_bytes) / 1e6:,.1f} MB or more; the disk has "
        f"{free / 1e6:,.1f} MB free, a quota or a limit on file sizes may allow less. Free "
        f"some space or lower {argument('keep')}; the older checkpoints are untouched"
    )
