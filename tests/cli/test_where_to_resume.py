"""Which checkpoint a run starts from, where the processes' hosts know different things."""

import logging
import os
from types import SimpleNamespace

import pytest

from hybridtrain._base.problem import Problem
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run import resume as run_resume
from hybridtrain.cli.run.resume import checkpoint_to_resume, named_checkpoint
from hybridtrain.cli.run.run_data import load_data
from hybridtrain.errors import CheckpointError, ConfigError, DataError
from hybridtrain.world import World


class Others(World):
    """Rank 0's world, with what the other ranks say to each `gather`."""

    others = ()

    def broadcast(self, value):
        return value

    def gather(self, value):
        return [value, *(other(value) for other in self.others)]


def context(folder, how="auto", others=()):
    world = Others()
    world.others = others
    config = Config(data={}, model={}, optim={}, resume=how)
    return SimpleNamespace(
        config=config,
        world=world,
        store=CheckpointStore(folder / "checkpoints"),
        settings=SimpleNamespace(of_run=None),
        directory=SimpleNamespace(path=folder),
    )


def save(folder, step):
    return CheckpointStore(folder / "checkpoints").save(step, {"a": lambda file: file.write(b"a")})


@pytest.fixture(autouse=True)
def no_restart(monkeypatch):
    for name in run_resume._RESTARTS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("resume", ["auto", "last", "best", "{}", "{}/checkpoints"])
def test_resume_names_the_same_checkpoint_in_a_check_as_in_the_run(tmp_path, resume):
    best, newest = save(tmp_path, 10), save(tmp_path, 20)
    CheckpointStore(tmp_path / "checkpoints").mark_best(10, 0.5)
    resume, store = resume.format(tmp_path), CheckpointStore(tmp_path / "checkpoints")
    in_run, in_check = (named_checkpoint(resume, store, reads=reads) for reads in (True, False))
    assert in_run == in_check == (best if resume == "best" else newest)


@pytest.mark.parametrize("rank_0", [None, 20])
def test_a_later_checkpoint_on_another_hosts_own_disk_is_not_passed_over(tmp_path, rank_0):
    if rank_0 is not None:
        save(tmp_path, rank_0)
    other = [lambda own: (0, 10, "n2"), lambda own: (0, 60, "n3")]
    with pytest.raises(CheckpointError, match=r"rank 2 on n3 has a checkpoint of step 60 .* has"):
        checkpoint_to_resume(context(tmp_path, others=other))
    # of a run that begins elsewhere, on purpose
    assert checkpoint_to_resume(context(tmp_path / "new", None, other)) is None


def test_an_older_checkpoint_on_another_hosts_own_disk_does_not_matter(tmp_path):
    newest = save(tmp_path, 20)
    found = checkpoint_to_resume(context(tmp_path, others=[lambda own: (0, 10, "n2")]))
    assert found == newest


def test_a_restart_that_another_host_has_counted_resumes_a_run_without_resume(tmp_path):
    newest = save(tmp_path, 20)
    with pytest.raises(ConfigError, match="resume=null would mix"):
        checkpoint_to_resume(context(tmp_path, None))
    found = checkpoint_to_resume(context(tmp_path, None, [lambda own: (2, *own[1:])]))
    assert found == newest


def test_a_job_that_is_started_again_without_a_checkpoint_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(os.environ, "SLURM_RESTART_COUNT", "1")
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_resume(context(tmp_path)) is None
    assert "no checkpoint in" in caplog.text
    assert "starting over" in caplog.text


def test_a_data_set_that_one_process_cannot_load_is_an_error_with_its_host_on_all():
    config = Config(data={"_target_": "hybridtrain.datasets.digits"}, model={}, optim={})
    world = Others(size=3)
    missing = Problem(2, DataError, "rank 2 on n3: no files in data")
    world.others = [lambda own: None, lambda own: missing]
    with pytest.raises(DataError, match="rank 2 on n3: no files in data"):
        load_data(config, world)
    world = Others()
    assert len(load_data(config, world).train) > 1000


@pytest.mark.parametrize(
    ("rank", "local_rank", "downloads"), [(0, 0, [True]), (1, 1, [False]), (2, 0, [True])]
)
def test_each_node_fetches_the_data_that_is_not_on_its_disk(
    monkeypatch, rank, local_rank, downloads
):
    asked = []

    def build(group, settings, *_, **__):
        asked.append(settings["download"])
        return "data"

    class Rank(World):
        def on_main(self, action):
            return action() if self.is_main else None

    monkeypatch.setattr("hybridtrain.cli.config.targets.build", build)
    config = Config(data={"_target_": "x", "download": True}, model={}, optim={})
    assert load_data(config, Rank(rank=rank, local_rank=local_rank)) == "data"
    assert asked == downloads
