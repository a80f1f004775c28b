"""Advice about unequal devices and replicas, from steps that were simulated."""

import pytest
import torch
from torch import nn

from hybridtrain.loop.advice import RecordedStep, advise
from hybridtrain.loop.run_stats import DeviceAccount, slow_replica
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import LayerCost, StageOwners, plan
from hybridtrain.schedule import Account, account_of, make_schedule, simulate

CHUNKS = 32


def recorded(rates, per_device=1, recomputed=0, loss=0.0, **options):
    """Returns a step over devices with these speeds, of 12 layers that cost the same.

    The first stage runs `recomputed` layers again, and the last one takes longer by the share
    `loss`.
    """
    devices = len(rates)
    options = {"split": "time", "chunks": CHUNKS, "stages_per_device": per_device} | options
    options = PipelineOptions(**options)
    layers = [LayerCost(str(i), 1, 1.0, 2.0) for i in range(12)]
    found = plan(
        nn.Sequential(*(nn.Linear(1, 1) for _ in layers)),
        options,
        torch.ones(CHUNKS, 1),
        StageOwners.of_cpus(devices),
        costs=lambda _, __: layers,
    )
    schedule = make_schedule("1f1b", devices, CHUNKS, per_device)
    at = [rates[schedule.lane_of[stage]] for stage in range(schedule.stages)]
    forward = [n * 1e-3 / rate for n, rate in zip(found.counts, at, strict=True)]
    backward = [2 * seconds for seconds in forward]
    backward[0] += recomputed * 1e-3 / at[0]
    forward[-1], backward[-1] = forward[-1] * (1 + loss), backward[-1] * (1 + loss)
    spans = simulate(schedule, forward, backward)
    account = Account.mean(account_of(schedule, spans))
    return RecordedStep(account, schedule, spans, spans, 1, 1, found, options, None)


def step_ms(rates, **options):
    return recorded(rates, **options).account.total * 1e3


@pytest.mark.parametrize("per_device", [1, 2])
def test_a_slow_device_is_named_with_the_speeds_that_even_it_out(per_device):
    (proposal,) = advise(recorded([1, 2], per_device))
    assert "device 0" in proposal.text
    assert "device_speeds=[1.0, 2.0]" in proposal.text
    better = step_ms([1, 2], per_device=per_device, device_speeds=[1, 2])
    assert proposal.seconds * 1e3 == pytest.approx(better)


def test_wrong_speeds_are_corrected():
    (proposal,) = advise(recorded([1, 3], device_speeds=[3, 1]))
    assert "device_speeds=[1.0, 3.0]" in proposal.text


def test_devices_as_the_plan_has_them_need_no_advice():
    assert advise(recorded([1, 2], device_speeds=[1, 2])) == []
    assert advise(recorded([1, 1.1])) == []


def test_recomputed_layers_and_the_loss_do_not_make_a_device_slow():
    first_half = [str(layer) for layer in range(6)]
    assert advise(recorded([1, 1], recompute=first_half, recomputed=6)) == []
    assert advise(recorded([1, 1], loss=0.5)) == []
    assert advise(recorded([1, 1, 1], loss=0.5)) == []
    assert advise(recorded([1, 1], per_device=2, loss=0.5)) == []


def test_a_slow_device_is_found_next_to_a_loss():
    (proposal,) = advise(recorded([1, 2], per_device=2, loss=0.5))
    assert "device_speeds=[1.0, 2.0]" in proposal.text


def of_replicas(*accounts):
    return [DeviceAccount(replica, 0, account) for replica, account in enumerate(accounts)]


def test_a_replica_that_computes_for_longer_is_told_with_better_shares():
    accounts = of_replicas(
        Account(forward=1.0, backward=3.0), Account(forward=0.5, backward=1.5, stragglers=2.0)
    )
    said = slow_replica(accounts, (1, 1))
    assert "replica 0" in said
    # 4 s and 2 s for equal halves: 8/3 s for a third and two thirds
    assert "replica_shares=[1.0, 2.0]" in said
    assert "2667 ms" in said
    assert "replica_shares" not in slow_replica(accounts)


def test_a_replica_that_loads_slowly_gets_no_other_share():
    accounts = of_replicas(
        Account(data=2.0, forward=1.0, backward=1.0),
        Account(forward=1.0, backward=1.0, stragglers=2.0),
    )
    assert "replica_shares" not in slow_replica(accounts, (1, 1))
