"""Stand-ins for the packages `wandb` and `mlflow`, which keep in memory what they are given."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest


class Service:
    """What a service has: the points of each run by its id, and how the run has ended."""

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, dict[str, float]]]] = defaultdict(list)
        self.states: dict[str, str] = {}


class _WandBRun:
    def __init__(self, service: Service, name: str) -> None:
        self._service, self.id = service, name
        points = service.points[name]
        self.step = points[-1][0] + 1 if points else 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.step = step
        self._service.points[self.id].append((step, dict(values)))

    def finish(self, exit_code: int) -> None:
        self._service.states[self.id] = "FAILED" if exit_code else "FINISHED"


class _Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class _MLflowClient:
    service: Service

    def __init__(self, tracking_uri: str) -> None:
        pass

    def get_run(self, run_id: str) -> Any:
        info = SimpleNamespace(run_id=run_id)
        return SimpleNamespace(info=info, data=SimpleNamespace(params={}))

    def create_run(self, experiment: str, **values: Any) -> Any:
        return self.get_run(f"run{len(self.service.points)}")

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def update_run(self, run_id: str, status: str) -> None:
        self.service.states[run_id] = status

    def log_batch(self, run_id: str, metrics: Sequence[_Metric] = (), **values: Any) -> None:
        self.service.points[run_id] += [(each.step, {each.key: each.value}) for each in metrics]

    def log_text(self, run_id: str, text: str, file: str) -> None:
        pass

    def get_metric_history(self, run_id: str, tag: str) -> list[Any]:
        points = self.service.points[run_id]
        return [SimpleNamespace(step=step) for step, values in points if tag in values]

    def set_terminated(self, run_id: str, status: str) -> None:
        self.service.states[run_id] = status


def install(package: str, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Puts a stand-in in the place of a package, and returns what it keeps."""
    service = Service()

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    if package == "wandb":
        module(
            "wandb",
            login=lambda **options: True,
            Settings=SimpleNamespace,
            Image=lambda picture: picture,
            init=lambda id, **options: _WandBRun(service, id),
        )
    else:
        client = type("MlflowClient", (_MLflowClient,), {"service": service})
        module("mlflow", MlflowClient=client, is_tracking_uri_set=lambda: False)
        module("mlflow.entities", Param=lambda *pair: pair, Metric=_Metric)
        module("mlflow.exceptions", MlflowException=LookupError)
        module("mlflow.store.db.db_types", DATABASE_ENGINES=["sqlite"])
    return service
