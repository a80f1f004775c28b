"""Checkpoint directories that survive a killed process, a power cut and a flipped bit.

A checkpoint is a directory of files, each written by a function of the caller. It is complete or
absent; `directory` has a diagram of the renames. Readers never repair anything; the next save
removes leftovers of killed runs.

`best.json` names the best checkpoint, which is kept regardless of `keep`. With `background`, a
thread does all of this, one save at a time.

Only one run at a time may save into a root: by its rank 0 alone, or by all of its processes, each
with its own files (`joint_save`). Any number of processes may read.
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
"""The choices for `CheckpointStore(writers=...)`."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = logging.getLogger(__name__)


class NoSpaceError(CheckpointError):
    """A checkpoint was not saved because the disk is full; a later save may succeed."""


class CheckpointStore:
    """The checkpoints of one run: `root/step_00000100/`, `root/step_00000200/`, ...

    Args:
        root: the directory of all checkpoints; created by the first `save`.
        keep: the number of newest checkpoints to keep, in addition to the best; None: all. A save
            needs space for one more.
        background: if True, `save` returns at once, and a thread writes the files. Only one save
            runs at a time: the next one waits for it, and so does `wait`.
        writers: the processes that write, for `save_checkpoint`. "all": each writes its share of
            the state into the same directory, which all must see. "rank0": rank 0 writes
            everything, and requests the tensors it lacks from the others one at a time. "auto":
            rank 0 if it has everything, else all if they see the directory, else rank 0.

    Attributes:
        host_copies: the copies of the state that a background save writes; the next one reuses
            their memory.
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
                f"{setting('keep', keep)} must be at least 1; to keep all, set "
                f"{setting('keep', None)}"
            )
        check_choice("writers", writers, WRITERS)
        self.root = Path(root)
        self.keep = keep
        self.background = background
        self.writers = writers
        self.host_copies = HostCopies()
        self._seen_by_all: bool | None = None  # not tested yet
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failed_step = -1
        # Reentrant: `publish` marks the best inside of it.
        self._lock = threading.RLock()  # for the directory, and for the next line
        self._unsaved_best: Best | None = None

    def save(
        self,
        step: int,
        files: Mapping[str, FileWriter],
        *,
        prune: bool = True,
        background: bool | None = None,
    ) -> Path:
        """Publishes the checkpoint of `step` with all `files`; returns its directory.

        When this returns, the checkpoint is on disk, unless the store saves in the `background`.
        A checkpoint of the same step is replaced; at any moment, the old or the new one can be
        loaded. With `keep`, the oldest ones are then removed, but never later steps or the best.

        Args:
            step: the number of completed optimizer steps.
            files: for each file name a function that writes it, to an append-only binary file. In
                the background they run while training continues, so they must write copies.
            prune: False to keep all older checkpoints this time.
            background: overrides the store's setting for this save.

        Raises:
            NoSpaceError: the disk is full; the older checkpoints are unchanged.
            CheckpointError: the files cannot be written (no permission); the older checkpoints are
                unchanged. For a background save, the next `save` or `wait` raises this error, or
                any other error of a function in `files`, and that call saves nothing.
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
        """Runs `save`, here or in the background, once the previous save has ended.

        Args:
            step: the number of completed optimizer steps.
            save: writes a checkpoint with `begin`, `write` and `publish`; returns its directory.
            background: see `save`.

        Returns:
            the directory; for a background save, the one that it will have.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        # one save at a time: `begin` removes all unpublished directories, and a failure of the
        # previous save is raised here
        self.wait()

        def run() -> Path:
            with activity.saving():
                return save()

        if not (self.background if background is None else background):
            return run()
        # not a daemon thread: the interpreter waits for it at exit
        self._thread = threading.Thread(
            target=self._in_background, args=(step, run), name="checkpoint", daemon=False
        )
        self._thread.start()
        # Even if the step is saved again: `tidy` gives the newest generation this name.
        return path_of(self.root, step)

    def is_seen_by_all(self, world: World, again: bool = False) -> bool:
        """Returns whether all processes see the directory; a collective call.

        Args:
            world: the processes.
            again: test the directory again, even if the result is known.

        Raises:
            CheckpointError: some processes do not see it and `writers` is "all"; the message lists
                them and both fixes.
        """
        if self._seen_by_all is None or again:
            without = ", ".join(hosts_without(self.root, world))
            if without and self.writers == "all":
                raise CheckpointError(
                    f"{setting('writers', 'all')} needs a directory that all processes see, but "
                    f"{without} cannot see rank 0's {self.root}: put it on a file system that all "
                    f"nodes share (output_dir=), or set {setting('writers', 'rank0')} to have rank "
                    "0 gather and write everything"
                )
            if without and world.is_main:
                _log.info(
                    "rank 0 gathers and writes the checkpoints, because %s is not seen by %s",
                    self.root, without,
                )  # fmt: skip
            self._seen_by_all = not without
        return self._seen_by_all

    def wait(self) -> None:
        """Waits until no save is in progress.

        Raises:
            Exception: the previous background save failed; raised once.
        """
        if (thread := self._thread) is not None:
            thread.join()  # orders the thread's write of `_failure` before the read below
            # Only the thread of the training reads or writes this attribute.
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            # The mark was for a checkpoint that does not exist now.
            with self._lock:
                if self._unsaved_best is not None and self._unsaved_best.step == self._failed_step:
                    self._unsaved_best = None
            try:
                raise failure
            finally:
                # its traceback would keep it, and the model, alive until the next collection
                del failure

    def mark_best(self, step: int, value: float, criterion: str | None = None) -> None:
        """Marks the checkpoint of `step` as the best, by `value`, until another is marked.

        The best checkpoint is never pruned. If `step` is not saved yet, its `save` sets the mark,
        and the previous best stays marked until then, so there always is a best one to load. If
        that save fails, the mark is dropped.

        Args:
            step: the number of completed optimizer steps.
            value: the value that selected it.
            criterion: the criterion, such as "min loss"; stored with the value.

        Raises:
            CheckpointError: the mark cannot be written.
        """
        with self._lock:
            best = Best(step, float(value), criterion)
            # Perhaps a thread is writing it just now: under the lock it is either published or not.
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
        """Returns the checkpoint marked as the best, or None without a mark.

        Raises:
            CheckpointError: the mark is damaged, or the marked checkpoint is missing or damaged.
        """
        # The mark and the directory belong together: a save in the background may replace both.
        with self._lock:
            mark = read_best(self.root)
            if mark is None:
                return None
            candidates = generations(self.root, mark.step)
        path = candidates[-1] if candidates else path_of(self.root, mark.step)
        # Outside of the lock: it reads every byte, and a save must not wait for that.
        verify(path)
        return path

    def newest_up_to(self, step: int) -> Path | None:
        """Returns the newest checkpoint up to `step`; it may be damaged."""
        paths = [path for other, _, path in published(self.root) if other <= step]
        return paths[-1] if paths else None

    def steps(self) -> list[int]:
        """Returns the steps of the published checkpoints, ascending; they may be damaged."""
        return sorted({step for step, _, _ in published(self.root)})

    def newest(self) -> Path | None:
        """Returns the newest intact checkpoint, or None if there are no checkpoints.

        Reads every byte of it. Skips damaged ones with a warning.

        Raises:
            CheckpointError: all are damaged; the user must decide whether to start from scratch.
        """
        # A run that is still training may prune the one that is being read.
        while checkpoints := published(self.root):
            for _, _, path in reversed(checkpoints):
                try:
                    verify(path)
                except CheckpointError as error:
                    _log.warning("skipping a damaged checkpoint: %s", error)
                    reason = error
                else:
                    return path
            if checkpoints == published(self.root):  # no run has replaced them in the meantime
                names = ", ".join(path.name for _, _, path in checkpoints)
                raise CheckpointError(
                    f"none of the checkpoints in {self.root} is intact ({names}): {reason}. "
                    f"Restore one from a copy, or {phrase('start a new run in another directory')}"
                )
        return None

    def begin(self, step: int) -> Path:
        """Removes leftovers of earlier saves, and creates the directory for the files of `step`.

        `begin`, `write` and `publish` are the parts of a save, for `joint_save`.

        Raises:
            CheckpointError: as `save`; the same holds for `write` and `publish`.
        """
        temporary = self.root / f"{TEMPORARY}{step}-{uuid4().hex}"
        with self._os_errors(step, temporary):
            make_directory(self.root)
            # first, because this is the space that a full disk lacks
            with self._lock:
                # Nobody else writes here: only one run saves into a root, and one save at a time.
                remove(self.root, list(self.root.glob(f"{TEMPORARY}*")))
            temporary.mkdir()
        return temporary

    def write(
        self, step: int, temporary: Path, files: Mapping[str, FileWriter]
    ) -> dict[str, dict[str, Any]]:
        """Writes files and syncs them to disk; returns their manifest entries."""
        with self._os_errors(step, temporary):
            return {name: write_file(temporary / name, write) for name, write in files.items()}

    def publish(
        self, step: int, temporary: Path, entries: Mapping[str, dict[str, Any]], prune: bool
    ) -> Path:
        """Gives a complete directory its final name; then marks the best, and prunes."""
        with self._os_errors(step, temporary):
            # Last: a directory without it is not a checkpoint, whatever files it has.
            manifest = render_manifest({"format": FORMAT, "step": step, "files": dict(entries)})
            # all files are on disk; the manifest and the names must be too, before the rename
            write_file(temporary / MANIFEST, lambda file: file.write(manifest))
            sync_directory(temporary)
            with self._lock:
                path = rename_into_place(self.root, temporary, step)

        # the checkpoint is on disk: later errors must not look like a failed save
        with self._lock:
            try:
                tidy(self.root, step, path)
                # mark before pruning, which may remove the previous best only then
                if (best := self._unsaved_best) is not None and best.step == step:
                    self.mark_best(step, best.value, best.criterion)
                if prune:
                    self._prune(step)
            except (OSError, CheckpointError) as error:
                _log.warning(
                    "%s is saved, but old checkpoints could not be cleaned up: %s", path, error
                )
            # Asked again: if `tidy` has failed, it has another name.
            return generations(self.root, step)[-1]

    def _in_background(self, step: int, run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:
            # logged now as well, in case the run is killed before its next save
            _log.error("the checkpoint of step %d was not saved: %s", step, error)
            # Read in `wait`, after the thread has been joined.
            self._failure, self._failed_step = error, step

    def _prune(self, last: int) -> None:
        """Removes the oldest checkpoints, keeping `keep` of those up to step `last`.

        Later steps stay: after a return to an earlier checkpoint, one of them may be the newest
        intact one. With a damaged mark, nothing is removed, because the best is unknown.
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
        """Converts an `OSError` in the block to a `CheckpointError` that says what to do."""
        try:
            yield
        except OSError as error:
            try:
                # a good estimate: the checkpoints of a run have nearly the same size
                files = read_manifest(published(self.root)[-1][2])["files"]
                previous = sum(entry["size"] for entry in files.values())
            except (CheckpointError, IndexError):
                previous = 0
            raise _save_error(temporary, step, error, previous) from error


def _save_error(temporary: Path, step: int, error: OSError, previous_bytes: int) -> CheckpointError:
    """Returns the error of a save that could not write or rename a file.

    Args:
        temporary: the directory that was written to; it may be missing.
        step: the step of the checkpoint.
        error: the system's error.
        previous_bytes: the size of the newest checkpoint, as an estimate; 0 if there is none.
    """
    root = temporary.parent
    message = f"cannot save the checkpoint of step {step} in {root}: {error}"
    if error.errno not in _NO_SPACE:
        return CheckpointError(message)
    # Counted as free below: it is removed after the failure.
    written = sum(file.stat().st_size for file in temporary.glob("*"))
    existing = next(path for path in (root, *root.parents) if path.is_dir())
    free = written + shutil.disk_usage(existing).free
    return NoSpaceError(
        f"{message}. It needs at least {max(written, previous_bytes) / 1e6:,.1f} MB; the disk has "
        f"{free / 1e6:,.1f} MB free, and a quota or a file size limit may allow less. Free some "
        f"space or lower {argument('keep')}; the older checkpoints are unchanged"
    )
