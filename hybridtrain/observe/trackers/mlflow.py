"""MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from hybridtrain.errors import ConfigError
from hybridtrain.observe.trackers.queued import QueuedTracker, flat
from hybridtrain.options import names_checked

_MOST_PARAMETERS = 100  # the server's limit per call


class MLflow(QueuedTracker):
    """Reports parameters, curves, results, texts and timeline pictures to MLflow.

    MLflow cannot delete points, and would store a second point for the same step. A resumed run
    therefore does not report steps that the interrupted attempt already reported; because resuming
    is exact, their losses are equal. MLflow cannot change parameters either: the artifacts `config`
    and `overrides` have the settings of a resumed run.

    Args:
        directory: the run directory.
        tracking_uri: the URI of a server or a store; None to use `MLFLOW_TRACKING_URI`, or else
            `mlflow.db` next to the run directory. Artifacts of a database are in `mlruns` next to
            it; a server has its own artifact store.
        experiment: the experiment of the run.
        group: a name for related runs, stored as the tag `group`; the command line uses the name of
            a sweep.
        tags: the tags of the run.

    Raises:
        ConfigError: the package is not installed.
    """

    package = "mlflow"

    @names_checked
    def __init__(
        self,
        directory: str | Path,
        tracking_uri: str | None = None,
        experiment: str = "hybridtrain",
        group: str | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory)
        self._uri = tracking_uri
        self._experiment = experiment
        self._tags = {"group": group} if group else {}
        self._tags |= {name: str(value) for name, value in (tags or {}).items()}
        self._client: Any = None
        self._run_id = ""
        self._resumed = False
        self._newest: dict[str, int] = {}  # tag -> last step reported by earlier attempts

    def begin(self, run_id: str | None, config: Mapping[str, Any], texts: Mapping[str, str]) -> str:
        """Begins the run; config keys become parameters, and texts become artifacts."""
        import mlflow
        from mlflow.entities import Param
        from mlflow.store.db.db_types import DATABASE_ENGINES

        where = self.directory.resolve().parent
        store = self._uri
        if store is None and mlflow.is_tracking_uri_set():
            store = mlflow.get_tracking_uri()
        if is_beside_run := store is None:
            store = _new_or_known(where / "mlflow.db")
        self._client = mlflow.MlflowClient(tracking_uri=store)
        run = self._run_of(run_id) if run_id else None
        self._resumed, self._newest = run is not None, {}
        if run is None:
            # MLflow's default for a database is `mlruns` in the working directory
            in_database = store.partition(":")[0].partition("+")[0] in DATABASE_ENGINES
            artifacts = (where / "mlruns").as_uri() if in_database else None
            experiment = self._experiment_id(artifacts)
            run = self._client.create_run(experiment, tags=self._tags, run_name=self.run_name)
        if is_beside_run:
            # whoever made the folder of runs has chosen it, and MLflow sends credentials there
            _refuse_elsewhere(str(run.info.artifact_uri), where / "mlflow.db")
        self._run_id = run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        new = [(key, value) for key, value in flat(config) if key not in run.data.params]
        parameters = [Param(key, str(value)) for key, value in new]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            some = parameters[first : first + _MOST_PARAMETERS]
            self._client.log_batch(self._run_id, params=some)
        for title, text in texts.items():
            suffix = "txt" if title == "layout" else "yaml"
            self._client.log_text(self._run_id, text, f"{title}.{suffix}")
        return self._run_id

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Reports values by tag."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        points = [
            Metric(tag, float(value), now, step)
            for tag, value in values.items()
            # Asked once per tag, and only in a resumed run.
            if step > self._newest_step(tag)
        ]
        self._client.log_batch(self._run_id, metrics=points)

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        """Reports a picture."""
        self._client.log_image(self._run_id, picture, artifact_file=f"{name}.png")

    def finish(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run_id, "FAILED" if self.failed else "FINISHED")

    def _run_of(self, run_id: str) -> Any:
        """Returns a run by its ID, or None if this store does not have it."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _experiment_id(self, artifacts: str | None) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                return str(self._client.create_experiment(self._experiment, artifacts))
            except MlflowException:  # another run just created it
                experiment = self._client.get_experiment_by_name(self._experiment)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _newest_step(self, tag: str) -> int:
        if not self._resumed:
            return -1
        if tag not in self._newest:
            history = self._client.get_metric_history(self._run_id, tag)
            self._newest[tag] = max((point.step for point in history), default=-1)
        return self._newest[tag]


def _refuse_elsewhere(artifacts: str, store: Path) -> None:
    """Raises a ConfigError if the artifacts of a run would leave this machine."""
    if urlsplit(artifacts).scheme not in ("", "file"):
        raise ConfigError(
            f"{store} sends artifacts to {artifacts}: if you trust it, set MLFLOW_TRACKING_URI to "
            f"sqlite:///{store}"
        )


def _new_or_known(path: Path) -> str:
    """Returns the URI of a store in a file, creating it atomically for concurrent runs.

    Raises:
        ConfigError: it is a link, to a database of another program perhaps.
    """
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link: set MLFLOW_TRACKING_URI to sqlite:///{os.readlink(path)} to use it"
        )
    if not path.exists():
        import mlflow

        # Made complete under another name: a second run must not find tables half made.
        new = path.with_name(f".mlflow-{os.getpid()}.db")
        try:
            mlflow.MlflowClient(tracking_uri=f"sqlite:///{new}")  # creates the tables
            with suppress(FileExistsError):  # created by another run meanwhile
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
    return f"sqlite:///{path}"
