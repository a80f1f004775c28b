"""A pipelined model is the model: its class, names, files, hooks and copies are as before."""

import copy
import inspect
import pickle
from types import MethodType

import pytest
import torch
from support.compare import CLOSE
from support.hf import Texts, llama, padded
from torch import nn

from hybridtrain import pipelined, unpipelined

pytestmark = pytest.mark.usefixtures("seeded")


class Net(nn.Module):
    """A net with a signature."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, scale=1.0, *, shift=0.0):
        return self.last(self.first(x).tanh()) * scale + shift


def pipe(net=None):
    return pipelined(net or Net(), devices=["cpu:0", "cpu:1"], chunks=3)


def step(net):
    net(torch.randn(6, 6)).sum().backward()
    return net


def test_the_same_object_of_the_same_class_comes_back():
    net = Net()
    before = list(vars(net))
    model = step(pipe(net))
    assert model is net
    assert list(vars(model)) == before
    assert isinstance(model, Net)
    assert model.__class__ is Net
    assert (type(model).__name__, type(model).__doc__) == ("Net", Net.__doc__)
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    assert repr(model) == repr(Net())
    assert list(model.state_dict()) == list(Net().state_dict())
    assert list(dict(model.named_modules())) == list(dict(Net().named_modules()))


@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_copies_and_pickles_are_plain_models(when):
    model = pipe() if when.startswith("before") else step(pipe())
    x = torch.randn(6, 6)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is Net
        torch.testing.assert_close(other(x), model(x), **CLOSE)
        torch.autograd.grad(other(x).sum(), other.first.weight)
    step(model)  # which is as it was


def test_modes_hooks_and_arguments_of_the_model_itself():
    plain, model = Net(), pipe()
    seen = []
    for net in (plain, model):
        net.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        net.register_forward_hook(lambda _, args, output: output * 2)
    step(model)  # in which checks run copies
    seen.clear()
    x = torch.randn(6, 6)
    for net in (plain, model):
        net.eval()
        assert not net.first.training
        net.train()
    torch.testing.assert_close(model(x, 3.0, shift=1.0), plain(x, 3.0, shift=1.0), **CLOSE)
    assert seen == [6, 6]  # once for the batch


def test_a_forward_that_is_patched_later_runs_inside():
    plain, model = Net(), pipe()
    x = torch.randn(6, 6)
    step(model)
    for net in (plain, model):
        before = net.forward
        net.forward = lambda x, before=before: before(x) + 1
    torch.testing.assert_close(model(x), plain(x), **CLOSE)
    del model.forward
    torch.testing.assert_close(model(x), Net()(x), **CLOSE)


def halved(net, as_method=False):
    """Patches the forward of a net, which calls the old one, as scripts do."""
    before = net.forward

    def forward(net, x):
        return before(x) / 2

    net.forward = MethodType(forward, net) if as_method else lambda x: forward(net, x)
    return net


@pytest.mark.parametrize("as_method", [False, True])
@pytest.mark.parametrize("part", ["", "last"])
def test_a_forward_that_was_patched_before_runs_inside(part, as_method, caplog):
    """Copies of the model, by which the first step is checked, leave the gradients alone."""
    plain, net, x = Net(), Net(), torch.randn(6, 6)
    for model in (plain, net):
        halved(model.get_submodule(part), as_method)
    with caplog.at_level("INFO", "hybridtrain"):
        model = pipe(net)
        model(x).sum().backward()
    plain(x).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **CLOSE)
    plan = next(r.args[1] for r in caplog.records if "pipelined(" in r.msg)
    assert [stage.layers[0].name for stage in plan.stages] == ["first", "last"]


def test_a_forward_that_a_notebook_has_patched_runs_inside():
    """Its cells hold the old forward in a global variable."""
    cells, plain, x = {"net": Net()}, halved(Net()), torch.randn(6, 6)
    exec("before = net.forward\nnet.forward = lambda x: before(x) / 2", cells)
    model = pipe(cells["net"])
    for net in (model, plain):
        net(x).sum().backward()
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad, **CLOSE)


def test_modules_that_are_replaced_are_followed():
    plain, model = Net(), step(pipe())
    for net in (plain, model):
        torch.manual_seed(1)
        net.last = nn.Linear(8, 5)
        net.zero_grad()
        net(torch.ones(6, 6)).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **CLOSE)


def test_frozen_parameters_get_no_gradient():
    model = step(pipe())
    model.zero_grad()
    model.first.requires_grad_(False)
    step(model)
    assert model.first.weight.grad is None
    assert model.last.weight.grad is not None


def test_a_script_may_say_what_ddp_shall_leave_out():
    model = pipe()
    model._ddp_params_and_buffers_to_ignore = ["first.bias"]  # as TRL's --ignore_bias_buffers
    step(model)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_unpipelined_gives_the_plain_model_back():
    model = unpipelined(step(pipe()))
    assert type(model) is Net
    assert not any(part.__dict__.get("_compiled_call_impl") for part in model.modules())
    assert torch.autograd.grad(model(torch.randn(6, 6)).sum(), model.first.weight)[0].any()
    step(pipelined(model, nb_part=2, chunks=2))


def test_a_transformers_model_is_saved_as_before(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = pipe(llama())
    model(**padded([Texts()[i] for i in range(4)])).loss.backward()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is transformers.LlamaForCausalLM
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.quick_cases("after")
def test_an_adapter_made_before_or_after(when):
    """PEFT calls `forward` of the model inside directly."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)

    def adapted(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    batch = padded([Texts()[i] for i in range(6)])
    plain = adapted(llama())
    model = pipe(adapted(llama())) if when == "before" else adapted(pipe(llama()))
    for _ in range(3):
        for net in (plain, model):
            net.zero_grad()
            net(**batch).loss.backward()
        gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert gradients
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, gradients[name], **CLOSE)
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(model(**batch).loss, llama()(**batch).loss, **CLOSE)
    assert list(peft.get_peft_model_state_dict(model)) == list(
        peft.get_peft_model_state_dict(plain)
    )
