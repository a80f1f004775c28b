"""The table of exactness: what a cell says, and that hybridtrain trains the unsplit model."""

from dataclasses import replace

import pytest
from support.forked import PRELOADED

from scripts.bench.exactness import __main__ as command
from scripts.bench.exactness import measure, plain
from scripts.bench.exactness.cases import CASES
from scripts.bench.exactness.systems import SYSTEMS
from scripts.bench.exactness.table import page
from scripts.bench.exactness.worker import preload

DEADLINE_S = 200
RIGHT = ("bitwise", "1e-7")
preload(PRELOADED)  # the server of the other tests, if this file is the first to need it
HYBRIDTRAIN = ("hybridtrain", "hybridtrain-distributed")


def processes_that_have(values):
    """Returns two processes that end with the same weights."""
    return [{"values": values, "replica": replica, "masks": {}} for replica in range(2)]


@pytest.mark.parametrize("weighing", plain.WEIGHINGS)
def test_the_weights_of_the_unsplit_model_are_bitwise(weighing):
    values = plain.train(CASES["padded"], weighing)
    assert measure.compare(CASES["padded"], processes_that_have(values)).verdict == "bitwise"


def test_a_last_bit_is_a_difference_of_rounding_and_a_wrong_gradient_is_wrong():
    values = plain.train(CASES["clipping"])
    values["0.weight"][0, 0] *= 1 + 1e-15
    assert measure.compare(CASES["clipping"], processes_that_have(values)).verdict.startswith(
        "1e-7"
    )
    unclipped = plain.train(replace(CASES["clipping"], clip=None))
    assert "wrong by" in measure.compare(CASES["clipping"], processes_that_have(unclipped)).verdict


def test_replicas_with_different_weights_are_reported():
    first, second = processes_that_have(plain.train(CASES["clipping"]))
    second["values"] = plain.first_weights(CASES["clipping"])
    assert measure.compare(CASES["clipping"], [first, second]).verdict == "replicas differ"


def test_a_run_that_draws_other_masks_is_not_the_same_run():
    base = measure.Result("bitwise", draws="of one seed")
    same = measure.Result("1e-7", draws="of one seed")
    assert measure.same_draws(same, base).verdict == "1e-7"
    other = measure.same_draws(measure.Result("1e-7", draws="of another seed"), base)
    assert other.verdict == "other draws"
    assert "1e-7" in other.note


def test_a_system_that_is_not_installed_has_a_column_that_says_so(monkeypatch):
    missing = replace(SYSTEMS["deepspeed"], package="not-a-package")
    monkeypatch.setitem(SYSTEMS, "deepspeed", missing)
    results = command.results_of("padded", "deepspeed", DEADLINE_S)
    assert "| not installed |" in page({("padded", "deepspeed"): results}, "")


@pytest.mark.thorough
def test_hybridtrain_weighs_padded_labels_as_the_unsplit_model_and_the_mean_of_means_does_not():
    assert measure.measure("hybridtrain", "padded", "plain", DEADLINE_S).verdict == "bitwise"
    peer = measure.measure("pipelining", "padded", "plain", DEADLINE_S)
    assert "wrong by" in peer.verdict


def test_processes_that_are_still_running_at_the_deadline_hang():
    assert measure.measure("hybridtrain", "padded", "plain", 0.1).verdict == "hangs"


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("system", HYBRIDTRAIN)
def test_hybridtrain_is_right_in_every_case(system, case):
    result = measure.measure(system, case, "plain", DEADLINE_S)
    if CASES[case].same_draws:
        result = measure.same_draws(result, measure.measure(system, "dropout", "plain", DEADLINE_S))
    assert result.verdict.startswith(RIGHT)


@pytest.mark.thorough
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name not in HYBRIDTRAIN])
def test_the_peers_that_are_installed_are_measured(system):
    if SYSTEMS[system].version is None:
        pytest.skip("not installed")
    assert measure.measure(system, "dropout", "plain", DEADLINE_S).verdict == "bitwise"
