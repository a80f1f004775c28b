"""What a pipeline cannot do is refused at that line, with the way out."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hybridtrain import Session, World, pipelined, unpipelined
from hybridtrain.errors import BatchError, ConfigError, UserError

pytestmark = pytest.mark.usefixtures("seeded")


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def pipe(model=None, **settings):
    return pipelined(model or net(), **{"nb_part": 2, "chunks": 4, **settings})


def test_a_second_backward_of_a_call():
    loss = pipe()(torch.randn(8, 6)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UserError, match="call the model again"):
        loss.backward()


def test_a_graph_of_the_backward():
    loss = pipe()(torch.randn(8, 6)).sum()
    with pytest.raises(UserError, match="create_graph=True"):
        loss.backward(create_graph=True)


def test_a_tensor_that_a_hook_has_kept_is_no_output():
    model, kept = pipe(), []
    model[0].register_forward_hook(lambda layer, args, output: kept.append(output))
    output = model(torch.randn(8, 6))
    with pytest.raises(RuntimeError) as caught:
        (output.sum() + kept[-1].tanh().sum()).backward()
    assert "return it from the model's forward" in caught.value.__notes__[-1]


def test_an_output_that_is_no_tensor():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x):
            return torch.distributions.Categorical(logits=self.body(x))

    with pytest.raises(BatchError, match="output is a Categorical that depends on the samples"):
        pipe(Policy())(torch.randn(8, 6))


@pytest.mark.parametrize("other", ["another name", "a list", "one entry more"])
def test_a_micro_batch_whose_output_has_another_structure(other):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, x):
            y = self.body(x)
            if not x.any():
                return {
                    "another name": {"scores": y, "step": 1},
                    "a list": {"logits": [y], "step": 1},
                    "one entry more": {"logits": y, "step": 1, "none": None},
                }[other]
            return {"logits": y, "step": 1}

    model, x = pipe(Changing()), torch.randn(8, 6)
    model(x)
    x[6:] = 0  # the last micro-batch
    with pytest.raises(BatchError, match="outputs of different structure"):
        model(x)


def test_a_compiled_model():
    with pytest.raises(ConfigError, match="compile=True"):
        torch.compile(pipe())
    with pytest.raises(ConfigError, match="compile=True"):
        pipe().compile()


def test_distributed_data_parallel():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="DistributedDataParallel cannot wrap"):
            DistributedDataParallel(pipe())
        around = DistributedDataParallel(nn.Sequential(pipe(), nn.Linear(3, 3)))
        with pytest.raises(ConfigError, match="DistributedDataParallel cannot wrap"):
            around(torch.randn(8, 6))
    finally:
        dist.destroy_process_group()


def test_data_parallel():
    model = pipe()
    for wrapped in (model, nn.Sequential(model, nn.Tanh())):
        with pytest.raises(ConfigError, match=r"DataParallel cannot wrap .*nb_part"):
            nn.DataParallel(wrapped)
    with pytest.raises(ConfigError, match="DataParallel cannot wrap"):
        model._replicate_for_data_parallel()  # as torch.nn.parallel.data_parallel does
    nn.DataParallel(unpipelined(model))


def test_parameters_that_are_replaced_after_the_optimizer_was_made():
    for steps_before in (0, 1):
        model = pipe()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps_before):
            model(torch.randn(8, 6)).sum().backward()
            optimizer.step()
        model[2] = nn.Linear(8, 8)
        model(torch.randn(8, 6)).sum().backward()
        with pytest.raises(ConfigError, match=r"2\.weight was replaced after this SGD was made"):
            optimizer.step()
        optimizer.add_param_group({"params": model[2].parameters()})
        optimizer.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_results_that_do_not_depend_on_the_number_of_processes():
    with pytest.raises(ConfigError, match=r"use Session\(world=World.from_env\(replicas=...\)\)"):
        pipe(replicas=4)
    with Session(world=World.from_env(nb_part=2, devices="cpu", replicas=4)) as session:
        assert session.world.logical_replicas == 4


def test_fully_sharded_data_parallel():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import FSDPModule

    model = pipe()
    with pytest.raises(ConfigError, match="FSDP cannot wrap"):
        model.__class__ = type("FSDPSequential", (FSDPModule, nn.Sequential), {})
    with pytest.raises(ConfigError, match="FSDP cannot wrap"):
        model._is_fsdp_managed_module = True  # which every version of FSDP sets
    assert fully_shard


def test_an_argument_with_another_number_of_rows():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, x, scale):
            return self.body(x) * scale[: len(x)]

    with pytest.raises(BatchError, match=r"hybridtrain.shared"):
        pipe(Scaled())(torch.randn(8, 6), torch.randn(9, 1))


def test_an_output_whose_samples_depend_on_one_another():
    class Compared(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, x):
            y = self.body(x)
            return y - y.mean(0)

    with pytest.raises(BatchError, match="depend on the others"):
        pipe(Compared())(torch.randn(8, 6))


def test_a_loss_that_is_neither_a_mean_nor_a_sum():
    class Contrastive(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, x):
            y = F.normalize(self.body(x), dim=1)
            return F.cross_entropy(5 * y @ y.T, torch.arange(len(x)))

    with pytest.raises(BatchError, match=r"neither a sum.* nor a mean over samples"):
        pipe(Contrastive())(torch.randn(8, 6))


def test_a_mean_that_the_arguments_do_not_count():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()

        def forward(self, x, factor):
            weight = (x * factor).exp()
            return (self.body(x).square().mean(1) * weight[:, 0]).sum() / weight[:, 0].sum()

    with pytest.raises(BatchError, match="micro-batches would give a different gradient"):
        pipe(Weighted())(torch.randn(8, 6), 2.0)


def test_plugins_of_accelerate_that_take_a_model_apart():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = pipe()
    for plugin in ("FSDP", "DEEPSPEED"):
        accelerator.state.distributed_type = accelerate.DistributedType[plugin]
        try:
            with pytest.raises(ConfigError, match=f"plugin {plugin} cannot wrap"):
                accelerator.prepare(model)
        finally:
            accelerator.state.distributed_type = accelerate.DistributedType.NO


def test_what_is_not_a_model_and_what_is_pipelined_already():
    with pytest.raises(ConfigError, match="not Linear"):
        pipelined(nn.Linear)
    with pytest.raises(ConfigError, match=r"unpipelined\(model\)"):
        pipe(pipe())


def test_no_devices():
    with pytest.raises(ConfigError, match="nb_part="):
        pipelined(net())


def test_an_unknown_setting():
    with pytest.raises(TypeError, match="did you mean 'schedule'"):
        pipe(scedule="1f1b")


@pytest.mark.parametrize("head", ["plain", "fused"])
def test_unpipelined_gives_the_plain_model_back(head):
    model, x = pipe(head=head), torch.randn(8, 6)
    model(x).sum().backward()
    unpipelined(model)
    assert type(model) is nn.Sequential
    # the graph of a plain model leads to its parameters
    assert torch.autograd.grad(model(x).sum(), model[0].weight)[0].any()
    assert not any(module.__dict__.get("_compiled_call_impl") for module in model.modules())
