"""What scripts of smp 1.x may do and may not, in two processes: a pipeline, or two replicas."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.launch import Cells
from support.smp_names import CONFIG, LOSS_SCALE, REFUSED, SIGNATURES, VALUES
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import hybridtrain.smp as smp
from hybridtrain.errors import BatchError, CheckpointError, ConfigError, SplitError, UserError
from hybridtrain.smp import runtime
from hybridtrain.smp.step import flags

cells = Cells()
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
REPLICAS = {"pipeline_parallel_degree": 1, "microbatches": 2}
LOCAL = {**PIPELINE, "hybridtrain": {"engine": "local"}}
SHARDED = {**REPLICAS, "shard_optimizer_state": True}


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def begin(config=PIPELINE, net=None, make=torch.optim.AdamW, **options):
    """A script's beginning: its model, optimizer, and a batch that differs between replicas."""
    runtime._runtime = None
    gc.collect()
    smp.init(config)
    net = net or build()
    optimizer = make(net.parameters(), lr=0.1)
    model = smp.DistributedModel(net, **options)
    optimizer = smp.DistributedOptimizer(optimizer)
    generator = torch.Generator().manual_seed(smp.dp_rank())
    x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    return SimpleNamespace(model=model, optimizer=optimizer, net=net, x=x, y=y)


@smp.step
def train_step(model, x, y):
    output = model(x)
    loss = F.cross_entropy(output, y)
    model.backward(loss)
    return output, loss


def plain_step(net, batches, chunks=2):
    """The same step of the unsplit model, over the batches of all replicas."""
    gradients = []
    for x, y in batches:
        net.zero_grad()
        for part, target in zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True):
            loss = F.cross_entropy(net(part), target)
            loss.backward(torch.full_like(loss, len(part) / len(x)))
        gradients.append([p.grad / len(batches) for p in net.parameters()])
    for parameter, *parts in zip(net.parameters(), *gradients, strict=True):
        parameter.grad = sum(parts)


def check_gradients(script, net, exact=True):
    """The gradients of this process's stages are those of `net`."""
    expected = dict(net.named_parameters())
    own = list(script.model.local_named_parameters())
    assert own
    for name, parameter in own:
        if exact:
            assert torch.equal(parameter.grad, expected[name].grad), name
        else:
            torch.testing.assert_close(parameter.grad, expected[name].grad)


@cells.add("outputs and losses are in all processes of the pipeline")
def _(world):
    script = begin()
    output, loss = train_step(script.model, script.x, script.y)
    net = build()
    expected = [F.cross_entropy(net(x), y) for x, y in zip(
        script.x.chunk(2), script.y.chunk(2), strict=True
    )]  # fmt: skip
    assert all(map(torch.equal, loss.outputs, expected))
    assert torch.equal(loss.reduce_mean(), torch.stack(expected).mean())
    assert torch.equal(loss.reduce_sum(), torch.stack(expected).sum())
    assert output.concat().shape == (8, 3)
    assert output.stack().shape == (2, 4, 3)
    assert not output.outputs[0].requires_grad
    plain_step(net, [(script.x, script.y)])
    check_gradients(script, net)


@cells.add("nested values are returned as they are, numbers as lists")
def _(world):
    script = begin()

    @smp.step
    def evaluate(model, x, y):
        output = model(x)
        return {
            "loss": [F.cross_entropy(output, y), None],
            "n": len(x),
            "large": output.repeat(9999, 1),
        }

    script.model.eval()
    with torch.no_grad():
        found = evaluate(script.model, script.x, script.y)
    assert isinstance(found["loss"][0], smp.StepOutput)
    assert found["loss"][1] is None
    assert found["n"] == [4, 4]
    assert found["large"].outputs[0].shape == (4 * 9999, 3)
    assert torch.equal(found["large"].outputs[1][:4], build()(script.x[4:]).detach())
    assert all(p.grad is None for p in script.model.local_parameters())


@cells.add("an evaluation needs no no_grad, and training goes on after it")
def _(world):
    script = begin()

    @smp.step
    def evaluate(model, x):
        return model(x)

    script.model.eval()
    assert not evaluate(script.model, script.x).concat().requires_grad
    script.model.train()
    train_step(script.model, script.x, script.y)
    net = build()
    plain_step(net, [(script.x, script.y)])
    check_gradients(script, net)


@cells.add("an unused output and an unused tensor argument")
def _(world):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = build()

        def forward(self, x, unused):
            output = self.body(x)
            return output, output * 2

    script = begin(net=Net())

    @smp.step
    def step(model, x, y, z):
        output, _ = model(x, unused=z)
        loss = F.cross_entropy(output, y)
        model.backward(loss)
        return loss

    step(script.model, script.x, script.y, torch.randn(8))
    net = Net()
    plain_step(lambdas(net), [(script.x, script.y)])
    check_gradients(script, net)


def lambdas(net):
    """`net` called with its first argument, for `plain_step`."""
    call = lambda x: net(x, None)[0]  # noqa: E731
    call.zero_grad, call.parameters = net.zero_grad, net.parameters
    return call


@cells.add("the norm and its clipping are over all stages, and torch's own is refused")
def _(world):
    script = begin()
    train_step(script.model, script.x, script.y)
    net = build()
    plain_step(net, [(script.x, script.y)])
    own = torch.stack([p.grad.norm() for p in script.model.local_parameters()]).norm()
    # as the documentation says: gather the norms of all partitions
    gathered = torch.stack(smp.allgather(own, smp.MP_GROUP)).norm()
    with pytest.raises(UserError, match=r"model.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(script.model.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    torch.testing.assert_close(gathered, expected)
    assert torch.equal(script.model.clip_grad_norm_(0.1), expected)
    check_gradients(script, net)


@cells.add("a batch that the micro-batches do not divide weighs each sample the same")
def _(world):
    script = begin()
    x, y = script.x[:7], script.y[:7]
    _, loss = train_step(script.model, x, y)
    net = build()
    plain_step(net, [(x, y)])
    check_gradients(script, net)
    torch.testing.assert_close(loss.reduce_mean(), F.cross_entropy(net(x), y))
    train_step(script.model, x[:1], y[:1])  # fewer samples than micro-batches


@cells.add("replicas may have batches of other sizes; each counts the same")
def _(world):
    script = begin(REPLICAS)
    own = (script.x[: 8 - 2 * world.rank], script.y[: 8 - 2 * world.rank])
    train_step(script.model, *own)
    net = build()
    plain_step(net, smp.allgather(own))
    check_gradients(script, net)


@cells.add("gradients are summed where the script says so")
def _(world):
    script = begin(average_grads_across_microbatches=False)

    @smp.step
    def step(model, x, y):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        model.backward(loss)

    assert step(script.model, script.x, script.y) is None
    net = build()
    for x, y in zip(script.x.chunk(2), script.y.chunk(2), strict=True):
        F.cross_entropy(net(x), y, reduction="sum").backward()
    check_gradients(script, net)


@cells.add(
    "the gradient of a step's input is that of the mean over the micro-batches", thorough=True
)
def _(world):
    for config in (PIPELINE, LOCAL):
        script = begin(config)
        x = script.x.requires_grad_()
        train_step(script.model, x, script.y)
        expected = x.detach().clone().requires_grad_()
        plain_step(build(), [(expected, script.y)])
        has_inputs = config is LOCAL or world.rank == 0  # of the first stage's process alone
        assert torch.equal(x.grad, expected.grad) if has_inputs else x.grad is None


@cells.add("gradients are accumulated without averaging: backward_passes_per_step and no_sync")
def _(world):
    for use in ("passes", "no_sync"):
        script = begin(REPLICAS, backward_passes_per_step=2 if use == "passes" else 1)
        if use == "passes":
            train_step(script.model, script.x, script.y)
        else:
            with script.model.no_sync():
                train_step(script.model, script.x, script.y)
        first = [p.grad.clone() for p in script.model.parameters()]
        assert not torch.equal(*smp.allgather(first[0]))
        train_step(script.model, script.x, script.y)
        assert torch.equal(*smp.allgather(next(script.model.parameters()).grad))


@cells.add("a backward of several tensors with their gradients", thorough=True)
def _(world):
    script = begin(average_grads_across_microbatches=False)

    @smp.step
    def step(model, x, g):
        output = model(x)
        model.backward([output, output.sum()], [g, None])

    gradient = torch.randn(8, 3, generator=torch.Generator().manual_seed(5))
    step(script.model, script.x, gradient)
    net = build()
    for x, g in zip(script.x.chunk(2), gradient.chunk(2), strict=True):
        output = net(x)
        torch.autograd.backward([output, output.sum()], [g, None])
    check_gradients(script, net, exact=False)


@cells.add("arguments that are not cut, other axes, and objects that cut themselves")
def _(world):
    script = begin()

    class Custom:
        def __init__(self, tensor):
            self.tensor = tensor

        def smp_slice(self, num_mb, mb, axis):
            size = self.tensor.shape[axis] // num_mb
            return Custom(self.tensor.narrow(axis, mb * size, size))

    @smp.step(non_split_inputs=["weights"], input_split_axes={"x": 1})
    def step(model, x, y, weights, names):
        assert weights.shape == (3,)
        assert names == ["a"]
        loss = F.cross_entropy(model(x.transpose(0, 1)), y.tensor, weight=weights)
        model.backward(loss)
        return loss, len(y.tensor)

    loss, sizes = step(script.model, script.x.T, Custom(script.y), torch.ones(3), names=["a"])
    assert sizes == [4, 4]
    _, expected = train_step(script.model, script.x, script.y)
    assert torch.equal(loss.reduce_mean(), expected.reduce_mean())
    with pytest.raises(BatchError, match=r"x has 8, y has 7"):
        train_step(script.model, script.x, script.y[:7])
    with pytest.raises(BatchError, match="got no tensor"):
        train_step(script.model, 1, 2)
    with pytest.raises(ConfigError, match="no argument 'z'"):
        smp.step(non_split_inputs=["z"])(train_step.__wrapped__)


@cells.add("a DataLoader passed to the step is one clear error")
def _(world):
    script = begin()
    with pytest.raises(BatchError, match="got a DataLoader as x"):
        train_step(script.model, DataLoader(script.x, 4), script.y)


@cells.add("what a step may not do is one clear error each, and the next step works")
def _(world):
    script = begin()
    model, optimizer = script.model, script.optimizer

    def twice(model, x, y):
        loss = F.cross_entropy(model(model(x)), y)
        model.backward(loss)

    def never(model, x, y):
        return x

    def early(model, x, y):
        model.backward(x.sum())
        return model(x)

    def outer(model, x, y):
        train_step(model, x, y)
        return model(x)

    def steps(model, x, y):
        optimizer.step()
        return model(x)

    def zeroes(model, x, y):
        optimizer.zero_grad()
        return model(x)

    mistakes = [
        (never, "does not call the model"),
        (early, "calls model.backward before it calls the model"),
        (outer, "is called inside another step"),
        (steps, "call it after the step"),
        (zeroes, "call it before"),
    ]
    for function, message in mistakes:
        with pytest.raises(UserError, match=message):
            smp.step(function)(model, script.x, script.y)
    if world.rank == 0:
        with pytest.raises(UserError, match=r"decorated with @smp.step"):
            model(script.x)
        with pytest.raises(UserError, match=r"decorated with @smp.step"):
            model.backward(script.x.sum())
    train_step(model, script.x, script.y)
    net = build()
    plain_step(net, [(script.x, script.y)])
    check_gradients(script, net)


@cells.add("a second call of the model, a forgotten backward and one too many are clear errors")
def _(world):
    # in one process, where a step that has failed does not end the others
    script = begin(LOCAL)

    @smp.step
    def twice(model, x, y):
        output = model(x)
        model.backward(F.cross_entropy(model(output), y))

    @smp.step
    def two(model, x, y):
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        model.backward(loss)

    @smp.step
    def maybe(model, x, y, trains):
        loss = F.cross_entropy(model(x), y)
        if trains:
            model.backward(loss)
        return loss

    @smp.step(trains=False)
    def hidden(model, x, y):
        model.backward(F.cross_entropy(model(x), y))

    @smp.step
    def inner_optimizer(model, x, y):
        model.backward(F.cross_entropy(model(x), y))
        script.optimizer.step()

    batch = script.model, script.x, script.y
    for step, message in [
        (twice, "calls the model a second time"),
        (two, "calls model.backward twice"),
        (hidden, "trains=True"),
        (inner_optimizer, "call it after the step"),
    ]:
        with pytest.raises(UserError, match=message):
            step(*batch)
    with pytest.raises(UserError, match=r"instead of loss\.backward\(\).* torch\.no_grad\(\)"):
        maybe(*batch, trains=False)
    with torch.no_grad():
        maybe(*batch, trains=False)
    script.optimizer.zero_grad()
    maybe(*batch, trains=True)
    nets = build()
    plain_step(nets, smp.allgather((script.x, script.y)))
    check_gradients(script, nets)


def refused_in_steps(script, scaler, folder):
    """Calls that a step must not make, anywhere in it."""
    model, optimizer = script.model, script.optimizer
    save = {"path": folder, "tag": "a"}
    return {
        "optimizer.step()": optimizer.step,
        "optimizer.zero_grad()": optimizer.zero_grad,
        "optimizer.clip_master_grads()": lambda: optimizer.clip_master_grads(1.0),
        "optimizer.state_dict()": optimizer.state_dict,
        "optimizer.load_state_dict()": lambda: optimizer.load_state_dict({}),
        "optimizer.add_param_group()": lambda: optimizer.add_param_group({"params": []}),
        "model.zero_grad()": model.zero_grad,
        "model.clip_grad_norm_()": lambda: model.clip_grad_norm_(1.0),
        "model.grad_norm()": model.grad_norm,
        "torch.nn.utils.clip_grad_norm_()": lambda: nn.utils.clip_grad_norm_(
            model.parameters(), 1.0
        ),
        "model.state_dict()": model.state_dict,
        "model.load_state_dict()": lambda: model.load_state_dict({}),
        "model.eval()": model.eval,
        "model.no_sync()": lambda: model.no_sync().__enter__(),
        "scaler.step()": lambda: scaler.step(optimizer),
        "scaler.unscale_()": lambda: scaler.unscale_(optimizer),
        "scaler.update()": scaler.update,
        "smp.save()": lambda: smp.save({}, f"{folder}/a"),
        "smp.save_checkpoint()": lambda: smp.save_checkpoint(**save, model=model),
        "smp.resume_from_checkpoint()": lambda: smp.resume_from_checkpoint(folder),
        "smp.DistributedOptimizer()": lambda: smp.DistributedOptimizer(optimizer),
        "smp.shutdown()": smp.shutdown,
        "train_step": lambda: train_step(model, script.x, script.y),
    }


MESSAGES = {
    "smp.allgather()": lambda: smp.allgather(1),
    "smp.allgather() ": lambda: smp.allgather(1, smp.MP_GROUP),
    "smp.barrier()": smp.barrier,
    "smp.barrier() ": smp.mp_barrier,
    "smp.broadcast()": lambda: smp.broadcast(1),
    "smp.reduce_scatter()": lambda: smp.reduce_scatter([1, 1]),
    "smp.send()": lambda: smp.send(1, 0),
    "smp.recv_from()": lambda: smp.recv_from(0),
}


@cells.add("calls that wait for other processes, or act on all micro-batches, are refused in steps")
def _(world):
    for config in (PIPELINE, LOCAL):
        script = begin(config)
        scaler = smp.amp.GradScaler(init_scale=8.0)
        calls = refused_in_steps(script, scaler, f"no folder of rank {world.rank}")

        @smp.step
        def step(model, x, y, calls):
            for call, run in calls.items():
                with pytest.raises(UserError, match=rf"{re.escape(call)} .*inside a.* step"):
                    run()
            everyone = smp.allgather(smp.rank())  # all processes are here
            output = model(x)
            for call, run in calls.items():
                with pytest.raises(UserError, match=rf"{re.escape(call)} .*inside a.* step"):
                    run()
            if smp.pp_size() > 1:
                for call, run in MESSAGES.items():
                    with pytest.raises(
                        UserError, match=rf"{re.escape(call.strip())} in step would"
                    ):
                        run()
            replicas = smp.allgather(smp.dp_rank(), smp.DP_GROUP)
            smp.dp_barrier()
            model.backward(F.cross_entropy(output, y))
            return everyone, replicas

        for _ in range(2):  # the first one partitions the model
            script.optimizer.zero_grad()
            everyone, replicas = step(script.model, script.x, script.y, calls)
            assert everyone == [[0, 0], [1, 1]]
            assert replicas == [[replica] * 2 for replica in range(smp.dp_size())]
        batches = smp.allgather((script.x, script.y), smp.DP_GROUP)
        net = build()
        plain_step(net, batches)
        check_gradients(script, net)


@cells.add("different batches of a pipeline's processes are one error with the way out")
def _(world):
    script = begin()

    @smp.step
    def train(model, x, y):
        model.backward(F.cross_entropy(model(x), y))

    @smp.step
    def evaluate(model, x):
        return model(x)

    own = script.x + world.rank, script.y  # as if samples were divided over all processes
    with pytest.raises(BatchError, match=r"ranks \[0, 1\] .*accelerate.*num_replicas=smp.dp_size"):
        train(script.model, *own)
    with pytest.raises(BatchError, match="passed different batches"):  # and of other sizes
        train(script.model, script.x[: 8 - world.rank], script.y[: 8 - world.rank])
    with torch.no_grad(), pytest.raises(BatchError, match="passed different batches"):
        evaluate(script.model, own[0])
    train(script.model, script.x, script.y)
    with pytest.raises(BatchError, match=r"received different batches.*smp.dp_size"):
        train(script.model, *own)  # in a later call
    # the ways out of the message
    data = TensorDataset(torch.arange(16.0).reshape(8, 2).repeat(1, 3) / 10, script.y)
    ways = [
        (PIPELINE, DistributedSampler(data, smp.dp_size(), smp.dp_rank()), data),
        (PIPELINE, None, smp.SplitDataset(data, {"0": 1.0})),
        (
            {**PIPELINE, "hybridtrain": {"broadcast_batch": True}},
            RandomSampler(data, generator=torch.Generator().manual_seed(world.rank)),
            data,
        ),
    ]
    for config, sampler, samples in ways:
        script = begin(config)
        for x, y in DataLoader(samples, batch_size=4, sampler=sampler):
            script.optimizer.zero_grad()
            train_step(script.model, x, y)
            first = smp.allgather((x, y))[0]
            net = build()
            plain_step(net, [first])
            check_gradients(script, net)
    with pytest.raises(
        BatchError, match=r"got 2 tensors in the process .* pass the same arguments"
    ):
        train_step(script.model, x, y if world.rank == 0 else [y, y])


SCALE = 1.0


@cells.add("a step that changes what the model reads is one clear error")
def _(world):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = build()
            self.factor = 1.0

        def forward(self, x):
            return self.body(x) * SCALE

    script = begin(net=Scaled())

    @smp.step
    def sets_global(model, x):
        global SCALE
        SCALE = 2.0
        return model(x)

    with pytest.raises(UserError, match=r"global variable SCALE, which Scaled.forward reads"):
        sets_global(script.model, script.x)

    @smp.step
    def sets_attribute(model, x):
        model.module.factor = 3.0
        return model(x)

    with pytest.raises(UserError, match=r"changes factor of the model from 1.0 to 3.0"):
        sets_attribute(script.model, script.x)


@cells.add("the model may be moved before its first step, and not to the CPU and back after it")
def _(world):
    script = begin()
    assert script.model.to(torch.device("cuda")).cuda() is script.model
    torch.cuda.set_device(smp.local_rank())
    assert script.x.to("cuda").to(device="cuda:0").cuda().device.type == "cpu"
    train_step(script.model, script.x, script.y)
    script.model.to(smp.device())
    with pytest.raises(UserError, match="cannot be moved or converted"):
        script.model.half()
    with pytest.raises(UserError, match="cannot be moved or converted"):
        script.model.to("meta")


@cells.add(
    "DistributedDataParallel inside and outside, a second model, a ScriptModule", thorough=True
)
def _(world):
    script = begin(REPLICAS)
    with pytest.raises(ConfigError, match="averages over the replicas itself"):
        DistributedDataParallel(script.model)
    with pytest.raises(UserError, match=r"one smp.DistributedModel"):
        smp.DistributedModel(build())
    runtime._runtime = None
    smp.init(REPLICAS)
    with pytest.raises(ConfigError, match=r"smp\.DistributedModel .*DistributedDataParallel"):
        smp.DistributedModel(DistributedDataParallel(build()))
    net = build()
    net[2] = torch.jit.script(net[2])
    script = begin(PIPELINE, net=net)
    train_step(script.model, script.x, script.y)
    plain = build()
    plain_step(plain, [(script.x, script.y)])
    check_gradients(script, plain)


@cells.add("autocast around the model's call holds in the stages", thorough=True)
def _(world):
    seen = []
    for config in (PIPELINE, LOCAL):
        script = begin(config)

        @smp.step
        def step(model, x, y):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(x)
                inside = output @ torch.ones(3, 3)
            outside = torch.ones(2, 2) @ torch.ones(2, 2)
            loss = F.cross_entropy(output.float(), y)
            model.backward(loss)
            return loss, output, inside, outside

        loss, output, inside, outside = step(script.model, script.x, script.y)
        assert output.outputs[0].dtype == inside.outputs[0].dtype == torch.bfloat16
        assert outside.outputs[0].dtype == torch.float32
        seen.append(loss.reduce_mean())
    net = build()
    with torch.autocast("cpu", torch.bfloat16):
        parts = [net(x).float() for x in script.x.chunk(2)]
    expected = [F.cross_entropy(p, y) for p, y in zip(parts, script.y.chunk(2), strict=True)]
    assert torch.equal(seen[1], torch.stack(expected).mean())


@cells.add("the gradient scaler takes one decision for all stages")
def _(world):
    script = begin(make=torch.optim.SGD)
    scaler = smp.amp.GradScaler(init_scale=8.0)

    @smp.step
    def step(model, x, y, scale):
        loss = F.cross_entropy(model(x), y) * scale
        model.backward(scaler.scale(loss))
        return loss

    net = build()
    for scale in (1.0, float("inf"), 1.0):
        script.optimizer.zero_grad()
        step(script.model, script.x, script.y, scale)
        scaler.step(script.optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        plain_step(net, [(script.x, script.y)])
        plain.step()
    expected = dict(net.named_parameters())
    for name, parameter in script.model.local_named_parameters():
        torch.testing.assert_close(parameter, expected[name])


@cells.add("fp16 with a dynamic and with a static scale")
def _(world):
    runtime._runtime = None
    smp.init({**PIPELINE, "fp16": True})
    with smp.model_creation(dtype=torch.float16):
        net = build()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 2, "min_scale": 1, "init_scale": 2.0**40},
    )
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    before = [p.clone() for p in model.parameters()]
    output, _ = train_step(model, x, y)
    assert output.outputs[0].dtype == torch.float16
    assert not optimizer.overflow
    optimizer.step()  # the scale is too large: no update, and a smaller one
    assert optimizer.overflow
    assert optimizer.loss_scale == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True)
               if not b.is_meta)  # fmt: skip
    for _ in range(60):
        optimizer.zero_grad()
        train_step(model, x, y)
        norm = optimizer.clip_master_grads(1e9)
        optimizer.step()
    assert optimizer.loss_scale < 2.0**30
    assert not optimizer.overflow
    assert torch.isfinite(norm)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True)
               if not b.is_meta)  # fmt: skip

    script = begin({**PIPELINE, "fp16": True})
    static = smp.DistributedOptimizer(script.optimizer, static_loss_scale=16.0)
    train_step(script.model, script.x, script.y)
    assert static.loss_scale == 16.0
    static.step()
    assert static.loss_scale == 16.0


@cells.add("two optimizers with fp16 have their gradients divided by the factor once")
def _(world):
    runtime._runtime = None
    smp.init({**REPLICAS, "fp16": True})
    net = build()
    model = smp.DistributedModel(net)
    optimizers = [
        smp.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1), static_loss_scale=16.0)
        for part in (net[:2], net[2:])
    ]
    generator = torch.Generator().manual_seed(smp.dp_rank())
    x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    for _ in range(2):
        train_step(model, x, y)
        expected = {n: (p - 0.1 * p.grad / 16.0).detach() for n, p in net.named_parameters()}
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in net.named_parameters():
            assert torch.allclose(parameter, expected[name], rtol=1e-5, atol=1e-7), name
        for optimizer in optimizers:
            optimizer.zero_grad()


@cells.add("a scaler of the script decides by itself, also for a fused optimizer")
def _(world):
    script = begin(
        REPLICAS, make=lambda parameters, lr: torch.optim.AdamW(parameters, lr, fused=True)
    )
    scaler = smp.amp.GradScaler("cpu", init_scale=16.0)

    @smp.step
    def scaled_step(model, x, y):
        model.backward(scaler.scale(F.cross_entropy(model(x), y)))

    plain = copy.deepcopy(script.net)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    batches = smp.allgather((script.x, script.y), smp.CommGroup.DP_GROUP)
    for _ in range(2):
        scaled_step(script.model, script.x, script.y)
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        plain_step(plain, batches)
        reference.step()
        for ours, theirs in zip(script.net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    before = [p.detach().clone() for p in script.net.parameters()]
    scaled_step(script.model, script.x, script.y)
    next(script.net.parameters()).grad.fill_(float("inf"))
    with warnings_of("hybridtrain.step") as said:
        scaler.step(script.optimizer)  # an overflow, which is no fault
        scaler.update()
    assert not said
    assert scaler.get_scale() == 8.0
    assert all(map(torch.equal, script.net.parameters(), before))


@cells.add("what another optimizer trains keeps its gradients")
def _(world):
    script = begin(REPLICAS, make=lambda parameters, lr: torch.optim.SGD(list(parameters)[:-2], lr))
    head = torch.optim.SGD(script.net[4].parameters(), lr=0.1)
    train_step(script.model, script.x, script.y)
    expected = [(p - 0.1 * p.grad).detach() for p in script.net.parameters()]
    script.optimizer.step()
    head.step()
    for parameter, value in zip(script.net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, value)


@cells.add("replicas that have not averaged decide each for itself")
def _(world):
    script = begin(REPLICAS, make=torch.optim.SGD)
    spoiled = script.x.clone()
    if smp.dp_rank() == 1:
        spoiled[0, 0] = float("nan")
    with script.model.no_sync():
        train_step(script.model, spoiled, script.y)
        script.optimizer.step()  # no process waits for the other
    finite = all(bool(p.isfinite().all()) for p in script.net.parameters())
    assert finite == (smp.dp_rank() == 0)


def skips_and_names(config):
    script = begin(config)
    train_step(script.model, script.x, script.y)
    script.optimizer.step()
    script.optimizer.zero_grad()
    before = {n: p.detach().clone() for n, p in script.model.local_named_parameters()}
    spoiled = script.x.clone()
    if smp.dp_rank() == smp.dp_size() - 1:  # of one replica alone
        spoiled[5, 2] = float("nan")
    with warnings_of("hybridtrain.step") as said:
        train_step(script.model, spoiled, script.y)
        script.optimizer.step()
        script.optimizer.zero_grad()
    for name, parameter in script.model.local_named_parameters():
        assert torch.equal(parameter, before[name]), name
    train_step(script.model, script.x, script.y)
    script.optimizer.step()
    assert any(not torch.equal(p, before[n]) for n, p in script.model.local_named_parameters())
    assert len(said) == (smp.rank() == 0)
    for text in said:
        assert text.startswith("skipping step 2 because its gradient is not finite")
        assert "the inputs of the batch, before stage 0: a tensor has NaN" in text


@contextlib.contextmanager
def warnings_of(name):
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


for _name, _config in [("a pipeline", PIPELINE), ("two replicas", REPLICAS)]:
    cells.add(
        f"a step that is not finite is skipped and named, in {_name}",
        thorough=_config is REPLICAS,
    )(lambda world, config=_config: skips_and_names(config))


@cells.add("a schedule may be made before the DistributedOptimizer")
def _(world):
    runtime._runtime = None
    smp.init({**PIPELINE, "fp16": True})
    optimizer = torch.optim.SGD(build().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer = smp.DistributedOptimizer(optimizer, static_loss_scale=1024.0)
    net = build()
    optimizer.param_groups[0]["params"] = list(net.parameters())
    (parameter, *_others) = net.parameters()
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.allclose(parameter, before - 0.1)
    assert optimizer._opt_called  # or the schedule warns
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    with pytest.raises(UserError, match=r"optimizer\.step\(closure\) .*fp16"):
        optimizer.step(lambda: None)
    replaced = torch.optim.SGD(net.parameters(), lr=0.1)
    replaced.step = lambda: None
    with pytest.raises(ConfigError, match=r"call smp.DistributedOptimizer first"):
        smp.DistributedOptimizer(replaced)


@cells.add(
    "a save removes no file of another name, and a load reads what was saved last", thorough=True
)
def _(world):
    folder = Path(smp.allgather(tempfile.mkdtemp())[0])
    begin()
    if world.rank == 0:
        for name in ("ckpt_100", "ckpt_7"):
            (folder / name).write_text("the script's own")
    smp.save(smp.rank(), f"{folder}/ckpt")
    smp.barrier()
    assert smp.load(f"{folder}/ckpt") == smp.rank()
    begin(REPLICAS)
    assert smp.load(f"{folder}/ckpt") == 0
    smp.barrier()
    smp.save("one part", f"{folder}/ckpt")
    smp.barrier()
    assert smp.load(f"{folder}/ckpt") == "one part"
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["ckpt.parts", "ckpt_0", "ckpt_100", "ckpt_7"]
    begin()
    assert smp.load(f"{folder}/ckpt") == "one part"
    with pytest.raises(CheckpointError, match=r"there is no .*other"):
        smp.load(f"{folder}/other")
    smp.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


@cells.add("the factor of the loss is in the optimizer's states and in checkpoints", thorough=True)
def _(world):
    folder = Path(smp.allgather(tempfile.mkdtemp())[0])
    fp16 = {**PIPELINE, "fp16": True}

    def script_with(scale):
        script = begin(fp16)
        smp.DistributedOptimizer(script.optimizer, dynamic_loss_scale=True, init_scale=scale)
        train_step(script.model, script.x, script.y)
        return script

    script = script_with(64.0)
    whole, part = script.optimizer.state_dict(), script.optimizer.local_state_dict()
    smp.save_checkpoint(folder, "a", model=script.model, optimizer=script.optimizer)
    smp.save(part, f"{folder}/part")
    smp.barrier()
    for state in (whole, part):
        other = script_with(2.0)
        other.optimizer.load_state_dict(copy.deepcopy(state))
        assert other.optimizer.loss_scale == 64.0
    other = script_with(2.0)
    smp.resume_from_checkpoint(folder)
    assert other.optimizer.loss_scale == 64.0
    begin(REPLICAS).optimizer.load_state_dict(smp.load(f"{folder}/part"))
    smp.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


@cells.add("the groups of an optimizer, and a parameter of the script's own, keep their numbers")
def _(world):
    script = begin()
    of_weights = [p for p in script.model.parameters() if p.dim() == 2]
    of_biases = [p for p in script.model.parameters() if p.dim() == 1]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(of_weights, lr=0.1))
    optimizer.add_param_group({"params": of_biases})
    temperature = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [temperature], "lr": 1.0})
    train_step(script.model, script.x, script.y)
    temperature.grad = torch.ones(1)
    optimizer.step()
    state = optimizer.state_dict()
    net = build()
    plain = torch.optim.AdamW([p for p in net.parameters() if p.dim() == 2], lr=0.1)
    plain.add_param_group({"params": [p for p in net.parameters() if p.dim() == 1]})
    plain.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 1.0})
    expected = [group["params"] for group in plain.state_dict()["param_groups"]]
    assert [group["params"] for group in state["param_groups"]] == expected
    assert list(state["state"]) == list(range(7))
    shapes = [state["state"][n]["exp_avg"].shape for n in range(7)]
    assert shapes == [p.shape for group in plain.param_groups for p in group["params"]]
    optimizer.load_state_dict(copy.deepcopy(state))
    with pytest.raises(UserError, match="add_param_group before the first step"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(UserError, match="DistributedOptimizer before the first step"):
        smp.DistributedOptimizer(torch.optim.AdamW(script.model.parameters()))


@cells.add("arguments keep their names behind *args, and an axis is counted from 0")
def _(world):
    script = begin()

    @smp.step(non_split_inputs=["rest"], input_split_axes={"y": 1})
    def step(model, x, *rest, y):
        return model(x), [one.clone() for one in rest], y.clone()

    script.model.eval()
    ones = torch.ones(3), torch.ones(5)
    _, rest, y = step(script.model, script.x, *ones, y=torch.zeros(3, 8))
    assert [one.outputs[0].shape[0] for one in rest] == [3, 5]
    assert y.outputs[0].shape == (3, 4)
    with pytest.raises(ConfigError, match=r"input_split_axes=.* -1 for 'x'"):
        smp.step(input_split_axes={"x": -1})(lambda model, x: model(x))


@cells.add(
    "what the processes of a pipeline draw is the same after a step that draws in its end",
    thorough=True,
)
def _(world):
    net = build()
    net.insert(1, nn.Dropout(0.5))
    script = begin(net=net)

    @smp.step
    def step(model, x, y, draws):
        output = model(x)
        if draws:
            output = F.dropout(output, 0.5)
        loss = F.cross_entropy(output, y)
        model.backward(loss)
        return loss

    torch.manual_seed(3)
    for draws in (False, True, True):
        before = torch.get_rng_state()
        step(script.model, script.x, script.y, draws)
        assert torch.equal(before, torch.get_rng_state()) is not draws
        orders = smp.allgather(torch.randperm(50))
        assert torch.equal(*orders)


@cells.add("a value that cannot be sent is one error in all processes")
def _(world):
    script = begin()

    @smp.step
    def step(model, x):
        model(x)
        return lambda: 0

    script.model.eval()
    with pytest.raises(UserError, match=r"cannot send .*lambda"):
        step(script.model, script.x)
    train_step(script.model.train(), script.x, script.y)


@cells.add(
    "flags of the whole process are refused around the model's call, and kept around the step's"
)
def _(world):
    script = begin()
    managers = {
        "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
        "cudnn.benchmark": lambda: torch.backends.cudnn.flags(benchmark=True),
        "flash": lambda: torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]),
    }

    @smp.step
    def step(model, x, manager):
        with manager():
            return model(x)

    before = flags()
    for name, manager in managers.items():
        with pytest.raises(UserError, match=rf"changes .*{name}"):
            step(script.model, script.x, manager)
        assert flags() == before
    script.model.eval()
    with torch.backends.cudnn.flags(benchmark=True):
        step(script.model, script.x, contextlib.nullcontext)


@cells.add("each root of model.backward has its own gradient")
def _(world):
    script = begin(LOCAL)

    @smp.step
    def step(model, x, gradients):
        output = model(x)
        model.backward([output, output * 2], gradients)

    with pytest.raises(UserError, match=r"2 tensors .*1 grad_tensors="):
        step(script.model, script.x, torch.ones(4, 3))


@cells.add("messages between ranks", thorough=True)
def _(world):
    begin()
    value = {"tensor": torch.arange(3), "text": "a"}
    if smp.rank() == 0:
        smp.send(value, 1, smp.RankType.MP_RANK)
        smp.broadcast("to all", smp.WORLD)
        with pytest.raises(UserError, match="DP_RANK 1 does not exist"):
            smp.send(value, 1, smp.DP_RANK)
    else:
        found = smp.recv_from(0, rank_type=smp.RankType.WORLD_RANK)
        assert found["text"] == "a"
        assert torch.equal(found["tensor"], torch.arange(3))
        assert smp.recv_from(0, smp.MP_RANK) == "to all"
    assert smp.allgather(smp.rank(), smp.PP_GROUP) == [0, 1]
    assert smp.allgather(smp.rank(), smp.DP_GROUP) == [smp.rank()]
    parts = [torch.tensor(10.0 * smp.rank()), torch.tensor(1.0 + smp.rank())]
    assert float(smp.reduce_scatter(parts, smp.WORLD)) == [10.0, 3.0][smp.rank()]
    for barrier in (smp.barrier, smp.mp_barrier, smp.dp_barrier, smp.pp_barrier, smp.tp_barrier):
        barrier()
    assert (smp.size(), smp.local_rank(), smp.local_size()) == (2, world.rank, 2)
    assert (smp.pp_rank(), smp.mp_size(), smp.dp_size(), smp.tp_size()) == (world.rank, 2, 1, 1)
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=smp.get_mp_process_group())
    assert total == 2
    assert smp.get_mp_group() == [0, 1]
    begin(REPLICAS)
    assert (smp.rdp_rank(), smp.dp_size(), smp.pp_size()) == (world.rank, 2, 1)
    assert smp.get_dp_group() == [0, 1]


@cells.add(
    "a model that was trained in two stages goes on in one, and in plain PyTorch", thorough=True
)
def _(world):
    folder = Path(smp.allgather(tempfile.mkdtemp())[0])
    script = begin()
    train_step(script.model, script.x, script.y)
    script.optimizer.step()
    for number in range(3):
        smp.save_checkpoint(
            folder, tag=f"steps{number}", model=script.model, optimizer=script.optimizer,
            user_content={"steps": number, "values": torch.arange(number)},
            num_kept_partial_checkpoints=2,
        )  # fmt: skip
    smp.save_checkpoint(folder, "full.pt", partial=False, model=script.model, user_content=5)
    own = script.model.local_state_dict(), script.optimizer.local_state_dict()
    smp.save({"model": own[0], "optimizer": own[1]}, f"{folder}/part.pt")
    whole = script.optimizer.state_dict()
    smp.barrier()
    batch = script.x, script.y
    script.optimizer.zero_grad()
    train_step(script.model, *batch)
    script.optimizer.step()
    expected = script.model.state_dict()

    def check():
        script.optimizer.zero_grad()
        train_step(script.model, *batch)
        script.optimizer.step()
        found = script.model.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    for config in (PIPELINE, REPLICAS, LOCAL, SHARDED):
        script = begin(config)  # before the first step
        content = smp.resume_from_checkpoint(folder)
        assert content["steps"] == 2
        assert torch.equal(content["values"], torch.arange(2))
        check()
        assert smp.resume_from_checkpoint(folder, tag="steps1")["steps"] == 1  # after it
        check()
        script = begin(config)
        parts = smp.load(f"{folder}/part.pt", partial=True)
        script.model.load_state_dict(parts["model"])
        script.optimizer.load_state_dict(parts["optimizer"])
        check()
        script = begin(config)
        assert smp.resume_from_checkpoint(folder, "full.pt", partial=False) == 5
        script.optimizer.load_state_dict(copy.deepcopy(whole))  # PyTorch keeps its tensors
        check()
    with pytest.raises((CheckpointError, UserError), match="no checkpoint 'steps0'"):
        smp.resume_from_checkpoint(folder, "steps0")
    begin(net=nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)))
    with pytest.raises((CheckpointError, UserError), match="another model"):
        smp.resume_from_checkpoint(folder)
    net = build()
    net.load_state_dict(torch.load(folder / "full.pt"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(whole))
    plain_step(net, [batch])
    optimizer.step()
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected[name])
    smp.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


@cells.add("an optimizer state that is spread over the replicas changes no bit", thorough=True)
def _(world):
    ends = []
    for config in (REPLICAS, SHARDED):
        script = begin(config)
        for _step in range(3):
            script.optimizer.zero_grad()
            train_step(script.model, script.x, script.y)
            script.optimizer.step()
        ends.append((script.model.state_dict(), script.optimizer.state_dict()))
    kept = sum(len(entry) > 0 for entry in script.optimizer.state.values())
    assert 0 < kept < len(list(script.model.parameters()))
    (weights, state), (sharded_weights, sharded_state) = ends
    assert all(torch.equal(weights[name], sharded_weights[name]) for name in weights)
    assert state["param_groups"] == sharded_state["param_groups"]
    assert state["state"].keys() == sharded_state["state"].keys()
    for number, entry in state["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, sharded_state["state"][number][name])
    script.optimizer.load_state_dict(copy.deepcopy(state))
    assert sum(len(entry) > 0 for entry in script.optimizer.state.values()) == kept


@cells.add("activation checkpointing by module changes no bit", thorough=True)
def _(world):
    class Net(nn.Module):
        def __init__(self, checkpoints=True):
            super().__init__()
            torch.manual_seed(1)
            self.one, self.two = nn.Linear(6, 8), build()
            self.three = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
            self.mid = nn.Linear(8, 6)
            self.run = smp.checkpoint if checkpoints else lambda module, x: module(x)

        def forward(self, x):
            x = self.run(self.mid, torch.tanh(self.one(x)))
            return smp.checkpoint_sequential(self.three, self.two(x), strategy="each")

    for config in (PIPELINE, LOCAL):
        script = begin(config, net=Net())
        smp.set_activation_checkpointing(script.net.two[2])
        train_step(script.model, script.x, script.y)
        recomputed = script.model.hybrid.options.recompute
        assert set(recomputed) == {"mid", "two.2", "three"}
        net = Net(checkpoints=False)
        batches = smp.allgather((script.x, script.y)) if config is LOCAL else [(script.x, script.y)]
        plain_step(net, batches)
        check_gradients(script, net)


@cells.add("an optimizer with groups, and a learning rate schedule", thorough=True)
def _(world):
    def groups(module):
        biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
        return [{"params": weights, "weight_decay": 0.1}, {"params": biases}]

    net = build()
    plain = torch.optim.AdamW(groups(net), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    script = begin()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups(script.model), lr=0.1))
    train_step(script.model, script.x, script.y)
    plain_step(net, [(script.x, script.y)])
    own = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, smp.DistributedOptimizer)
    assert optimizer.optimizer is optimizer
    for _ in range(2):
        optimizer.step()
        own.step()
        plain.step()
        schedule.step()
    expected = dict(net.named_parameters())
    for name, parameter in script.model.local_named_parameters():
        assert torch.equal(parameter, expected[name])
    state = optimizer.state_dict()
    assert len(state["state"]) == len(expected)
    optimizer.load_state_dict(state)


@cells.add("hooks after the partition, partitions, and names that are refused", thorough=True)
def _(world):
    script = begin()
    called = []
    script.model.register_post_partition_hook(lambda model, optimizer: called.append(optimizer))
    removed = script.model.register_post_partition_hook(lambda model, optimizer: called.append(1))
    removed.remove()
    assert not script.model.partitioned
    with pytest.raises(UserError, match="register_post_partition_hook"):
        script.model.local_state_dict()
    train_step(script.model, script.x, script.y)
    assert called == [script.optimizer]
    assert smp.get_partition(script.net[0]) == 0
    assert smp.get_partition(script.net[4]) == 1
    assert script.model.local_state_dict()["_smp_is_partial"]
    assert len(script.model.state_dict()) == len(build().state_dict())
    for name in ("tp_register", "fp16"):
        with pytest.raises(ConfigError, match=rf"smp.{name}: "):
            getattr(smp, name)
    with pytest.raises(ConfigError, match=r"smp\.nn\.DistributedTransformer .*tensor parallelism"):
        smp.nn.DistributedTransformer  # noqa: B018
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1, fused_softmax=True):
        assert script.model.module.module is script.net
    with pytest.raises(ConfigError, match="tensor parallelism is not"), smp.tensor_parallelism():
        pass
    with pytest.raises(AttributeError):
        smp.no_such_name  # noqa: B018


class Settings:
    """A configuration, as those of transformers are."""

    def __init__(self, **fields):
        self.fields = fields

    def to_dict(self):
        return self.fields

    @classmethod
    def from_dict(cls, fields):
        return cls(**fields)


@cells.add("a configuration is saved by its fields, and other objects where files are trusted")
def _(world):
    folder = Path(smp.allgather(tempfile.mkdtemp())[0])
    content = {"config": Settings(layers=2, labels={0: "a"}), "args": {"lr": 0.1, "dirs": ["a"]}}
    script = begin()
    train_step(script.model, script.x, script.y)
    for partial in (True, False):
        saved = {"path": folder, "tag": f"{partial}", "partial": partial}
        smp.save_checkpoint(**saved, optimizer=script.optimizer, user_content=content)
        smp.barrier()
        found = smp.resume_from_checkpoint(folder, f"{partial}", partial)
        assert isinstance(found["config"], Settings)
        assert found["config"].fields == content["config"].fields
        assert found["args"] == content["args"]
        with pytest.raises(CheckpointError, match=r"SimpleNamespace at user_content.*trust_pick"):
            smp.save_checkpoint(**saved, user_content={"any": SimpleNamespace()})
    smp.save({**content, "model": script.model.local_state_dict()}, f"{folder}/parts")
    smp.save(SimpleNamespace(), f"{folder}/any")
    smp.barrier()
    assert smp.load(f"{folder}/parts")["config"].fields == content["config"].fields
    with pytest.raises(CheckpointError, match="trust_pickles"):
        smp.load(f"{folder}/any")
    with pytest.raises(CheckpointError, match="trust_pickles"):
        smp.load(f"{folder}/parts", pickle_module=pickle)
    assert smp.load(f"{folder}/any", weights_only=False) == SimpleNamespace()
    Settings.__name__ = "Gone"  # as in a script that has not imported it
    del globals()["Settings"]
    assert smp.load(f"{folder}/parts")["config"] == content["config"].fields
    begin({**PIPELINE, "hybridtrain": {"trust_pickles": True}})
    assert smp.load(f"{folder}/any") == SimpleNamespace()
    smp.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


@cells.add("errors of the library name smp's keys")
def _(world):
    net = build()
    smp.set_partition(net[0], 1)
    smp.set_partition(net[4], 0)
    script = begin({**PIPELINE, "auto_partition": False, "default_partition": 0}, net=net)
    said = r"stage 0 .*'\d' on stage 1"
    with pytest.raises((SplitError, UserError), match=said):
        train_step(script.model, script.x, script.y)
    net = build()
    smp.set_partition(net, 1)
    script = begin({**PIPELINE, "auto_partition": False, "default_partition": 1}, net=net)
    said = r"2 stages .*stage 0:.*pipeline_parallel_degree="
    with pytest.raises((SplitError, UserError), match=said):
        train_step(script.model, script.x, script.y)
    net = build()
    net = nn.Sequential(*net, nn.Linear(3, 8), net[2], nn.Linear(8, 3))
    for part, index in ((net[0], 0), (net[2], 0), (net[4], 1), (net[5], 1), (net[7], 1)):
        smp.set_partition(part, index)
    script = begin({**PIPELINE, "auto_partition": False, "default_partition": 0}, net=net)
    said = r"'2@2' .*stage 0 .*: .*'2'"
    with pytest.raises((SplitError, UserError), match=said):
        train_step(script.model, script.x, script.y)
    script = begin()
    with pytest.raises(BatchError, match="2 micro-batches"):
        train_step(script.model, script.x, script.y[:7])


@cells.add("every name of the page takes every argument of smp's documented signature")
def _(world):
    folder = Path(smp.allgather(tempfile.mkdtemp())[0])
    config = {**CONFIG, "fp16": True, "hybridtrain": {"trust_pickles": True}}
    of, called = {}, set()

    def call(name, **arguments):
        assert set(arguments) == set(SIGNATURES[name].split()), name
        called.add(name)
        *path, last = name.split(".")
        target = of.get(path[0]) if path else smp
        return getattr(target or getattr(smp, path[0]), last)(**arguments)

    runtime._runtime = None
    gc.collect()
    call("init", config=config)
    for name, arguments in SIGNATURES.items():
        if not arguments and "." not in name and name != "init":
            call(name)
    call("barrier", group=smp.WORLD)
    if smp.rank() == 0:
        call("broadcast", obj="a", group=smp.CommGroup.WORLD)
        call("send", obj="b", dest_rank=1, rank_type=smp.RankType.MP_RANK)
        assert call("recv_from", src_rank=1, rank_type=smp.MP_RANK) == "c"
    else:
        assert call("recv_from", src_rank=0, rank_type=smp.WORLD_RANK) == "a"
        assert call("recv_from", src_rank=0, rank_type=smp.MP_RANK) == "b"
        call("send", obj="c", dest_rank=0, rank_type=smp.MP_RANK)
        called.add("broadcast")
    assert call("allgather", obj=smp.rank(), group=smp.PP_GROUP) == [0, 1]
    assert call("reduce_scatter", parts=[1, 2], group=smp.WORLD) == 2 * (1 + smp.rank())
    with (
        call("model_creation", tensor_parallelism=False, dtype=None, attention_in_fp32=True),
        call("tensor_parallelism", enabled=False, attention_in_fp32=True),
        call("delay_param_initialization", enabled=True),
        call("partition", index=1),
    ):
        norm = call("nn.FusedLayerNorm", normalized_shape=8, eps=1e-5, elementwise_affine=True)

    # not by `call`, which a trace cannot see through
    checked = {"preserve_rng_state": True}
    more = {**checked, "strategy": "each", "pack_args_as_tuple": False}
    assert {"module", *checked} == set(SIGNATURES["checkpoint"].split())
    wanted = set(SIGNATURES["checkpoint_sequential"].split())
    assert {"sequential_module", "input", *more} == wanted
    called.update(("checkpoint", "checkpoint_sequential"))

    def checkpoint(module, x):
        return smp.checkpoint(module, x, **checked)

    def checkpoint_sequential(module, x):
        return smp.checkpoint_sequential(sequential_module=module, input=x, **more)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.one, self.norm, self.two = nn.Linear(6, 8), norm, build()[2:]

        def forward(self, x):
            x = self.norm(checkpoint(self.one, x))
            return checkpoint_sequential(self.two, x)

    net = Net()
    call("set_partition", module=net.one, index=0)
    call("set_tensor_parallelism", module=net.one, enabled=False, attention_in_fp32=True)
    for kind in ("FusedLAMB", "FusedNovoGrad"):
        call(f"optimizers.{kind}", params=net.parameters(), lr=0.1)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    model = of["DistributedModel"] = call(
        "DistributedModel",
        module=net,
        trace_device="gpu",
        trace_execution_times=False,
        overlapping_allreduce=True,
        backward_passes_per_step=1,
        average_grads_across_microbatches=True,
        bucket_cap_mb=25,
        trace_memory_usage=False,
        broadcast_buffers=True,
        find_unused_parameters=False,
        gradient_as_bucket_view=True,
    )
    optimizer = of["DistributedOptimizer"] = call(
        "DistributedOptimizer",
        optimizer=plain,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args=dict(LOSS_SCALE),
    )
    call(
        "set_activation_checkpointing",
        module=net.two,
        preserve_rng_state=True,
        pack_args_as_tuple=False,
        strategy="each",
    )
    hooks = []
    for when in ("partition", "step"):
        hook = lambda *given: hooks.append(given)  # noqa: E731
        call(f"DistributedModel.register_post_{when}_hook", hook=hook)
    call("DistributedModel.to", device="cuda")
    call("DistributedModel.cuda", device=0)

    @call("step", non_split_inputs=["weight"], input_split_axes={"x": 0}, detach_outputs=True)
    def step(model, x, y, weight):
        output = model(x).float()
        # not by `call`: that it trains is seen by the name
        model.backward(tensors=[F.cross_entropy(output, y, weight)], grad_tensors=None)
        return output

    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    of["StepOutput"] = step(model, x, y, torch.ones(3))
    assert SIGNATURES["DistributedModel.backward"] == "tensors grad_tensors"
    called.add("DistributedModel.backward")
    assert hooks == [(model, optimizer)] * 2
    call("DistributedOptimizer.clip_master_grads", max_norm=1.0)
    optimizer.step()
    for kind in ("distributed", "scaled_batch"):
        for parameter in model.local_parameters():
            assert not call(f"DistributedModel.is_{kind}_parameter", param=parameter)
        assert not call(f"DistributedModel.is_{kind}_buffer", buf=torch.ones(1))
    assert [*model.default_reducer_named_parameters()] == [*model.local_named_parameters()]
    assert not [*model.scaled_batch_reducer_named_parameters(), *model.distributed_modules()]
    call("get_partition", module=net.one)
    for owner in ("StepOutput", "DistributedModel", "DistributedOptimizer"):
        for name, arguments in SIGNATURES.items():
            if name.startswith(f"{owner}.") and not arguments:
                call(name)
    state = call("DistributedModel.state_dict", gather_to_rank0=True)
    call(
        "DistributedModel.load_state_dict", state_dict=state, strict=True, same_partition_load=True
    )
    part = call("DistributedOptimizer.local_state_dict", gather_if_shard=True)
    call("DistributedOptimizer.load_state_dict", state_dict=part)
    call(
        "amp.GradScaler",
        init_scale=8.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
    )
    for v3 in (True, False):
        call("save", obj=part, f=f"{folder}/part", partial=True, pickle_module=pickle,
             pickle_protocol=2, v3=v3)  # fmt: skip
    assert torch.load(f"{folder}/part_{smp.pp_rank()}_{smp.tp_rank()}_{smp.rdp_rank()}")
    call("load", f=f"{folder}/part", map_location="cpu", pickle_module=pickle, partial=True)
    for partial in (True, False):
        call(
            "save_checkpoint",
            path=str(folder),
            tag=f"tag{partial}",
            partial=partial,
            model=model,
            optimizer=optimizer,
            user_content={"any": SimpleNamespace(steps=3)},
            translate_if_full=True,
            num_kept_partial_checkpoints=1,
        )
        smp.barrier()
        content = call(
            "resume_from_checkpoint",
            path=str(folder),
            tag=f"tag{partial}",
            partial=partial,
            strict=True,
            load_optimizer=True,
            load_sharded_optimizer_state=True,
            translate_function=lambda state: state,
        )
        assert content["any"].steps == 3
    for name in VALUES.split():
        owner, _, value = name.rpartition(".")
        assert hasattr(of[owner] if owner else smp, value), name
    assert called == SIGNATURES.keys()
    for name in REFUSED.split():
        owner, _, refused = name.rpartition(".")
        with pytest.raises(ConfigError, match=rf"{refused}.* not supported|fp16=true"):
            getattr(of.get(owner) or (smp.nn if owner else smp), refused)(None, None)
    smp.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


if __name__ == "__main__":
    smp.init(PIPELINE)
    cells.main(*sys.argv[1:])
