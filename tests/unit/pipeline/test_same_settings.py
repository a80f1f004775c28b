"""Settings of optimizers that a custom loop compares through the store, without waiting."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from hybridtrain._base.torch_private import HashStore
from hybridtrain.errors import ConfigError
from hybridtrain.launch import ProcessStore
from hybridtrain.pipeline import SettingsCheck


class CountedStore:
    """A store that counts its requests."""

    def __init__(self) -> None:
        self._store, self.requests = HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes two steps on each of `rates`' ranks, with a learning rate, and a momentum by stage."""
    monkeypatch.setattr(SettingsCheck, "_models", itertools.repeat(0))

    def train_ranks(rates: list[float], momenta: tuple[float, float] = (0.0, 0.0)) -> int:
        store, size = CountedStore(), len(rates)
        for rank, rate in enumerate(rates):
            watchdog = SimpleNamespace(store=ProcessStore(store, rank, size))
            world: Any = SimpleNamespace(
                rank=rank, size=size, watchdog=watchdog, processes_per_replica=2
            )
            weight, stage = Parameter(torch.ones(1)), rank % 2
            pipeline: Any = SimpleNamespace(trained=[weight], stages=[SimpleNamespace(index=stage)])
            check = SettingsCheck(world)
            check.begin_step(pipeline)
            groups = [{"params": [weight], "momentum": momenta[stage]}]
            optimizer = SGD(groups, lr=rate)
            optimizer.step()
            check.begin_step(pipeline)
        return store.requests

    return train_ranks


def test_each_rank_makes_as_many_requests_as_in_a_small_run(train: Any) -> None:
    assert train([0.1] * 64) == 16 * train([0.1] * 4)


def test_groups_of_stages_that_differ_are_one_warning_and_few_requests(
    train: Any, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [train([0.1] * size, momenta=(0.0, 0.9)) for size in (32, 64)]
    assert requests[1] <= 2 * requests[0]
    assert caplog.text.count("momentum= of parameter group 0 of the optimizer differs") == 2


def test_the_first_rank_that_differs_names_the_values_of_all(train: Any) -> None:
    with pytest.raises(ConfigError, match=r"^lr= .*: 0\.1 on ranks 0-2 \(.*, 0\.2 on rank 3 \("):
        train([0.1, 0.1, 0.1, 0.2, 0.3])
