"""A HybridModel from its constructor on: complete, readable, and clear about what it cannot do."""

import copy
import pickle
import threading
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridtrain
from hybridtrain import HybridModel, PipelineOptions, World
from hybridtrain.errors import BatchError, ConfigError, UserError
from hybridtrain.partitioning import table

LIBRARY = str(Path(hybridtrain.__file__).parent)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(2, 3)

    def forward(self, a, b, scale=None):
        out = self.left(a) + self.right(b)
        return out if scale is None else out * scale


class WhoCalls(nn.Module):
    """Remembers the frames of the library between the model's forward and its own."""

    def forward(self, x):
        names = [frame.name for frame in traceback.extract_stack() if LIBRARY in frame.filename]
        if "run_layer" in names:
            self.frames = names[names.index("__call__", names.index("run")) :]
        return x


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.who = WhoCalls()
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.who(self.first(x)))


def test_settings_are_the_short_form_of_options():
    world = World.from_env(nb_part=2, devices="cpu")
    short = HybridModel(chain(), world, chunks=4, schedule="gpipe")
    long = HybridModel(chain(), world, PipelineOptions(chunks=4, schedule="gpipe"))
    assert short.options == long.options == PipelineOptions(chunks=4, schedule="gpipe")


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"unknown setting chnks=: did you mean 'chunks'\?"):
        HybridModel(chain(), World(), chnks=4)


def test_a_sequential_has_its_stages_before_the_first_batch():
    model = HybridModel(chain(), World.from_env(nb_part=2, devices="cpu"))
    assert [[layer.name for layer in stage.layers] for stage in model.stages] == [["0", "1"], ["2"]]
    assert model.plan.layer_names == [["0", "1"], ["2"]]


def test_it_is_called_as_the_module_is():
    net = TwoInputs().eval()
    a, b = torch.randn(6, 4), torch.randn(6, 2)
    plain = net(a, b)
    world = World.from_env(nb_part=2, devices="cpu")
    model = HybridModel(net, world, chunks=3, example_inputs=(a, b))
    torch.testing.assert_close(model(a, b), plain)
    torch.testing.assert_close(model((a, b)), plain)
    with pytest.raises(BatchError, match="all by position or all by keyword"):
        model(a, b=b)


def test_inputs_by_keyword_are_passed_by_keyword():
    net = TwoInputs().eval()
    batch = {"a": torch.randn(6, 4), "b": torch.randn(6, 2)}
    world = World.from_env(nb_part=2, devices="cpu")
    model = HybridModel(net, world, chunks=3, example_inputs=batch)
    torch.testing.assert_close(model(**batch), net(**batch))


@pytest.mark.parametrize("net", [nn.Sequential(nn.Linear(4, 4), WhoCalls()), Traced()])
def test_three_frames_lie_between_the_users_forward_and_that_of_a_layer(net):
    model = HybridModel(net, World.from_env(nb_part=2, devices="cpu"), chunks=2)
    for _ in range(5):  # some of the first also look inside the layers
        model.train_step(torch.randn(4, 4), torch.randn(4, 4), nn.functional.mse_loss)
    (who,) = (part for part in net.modules() if isinstance(part, WhoCalls))
    assert len(who.frames) == 3, who.frames


def test_results_are_those_of_the_function_for_each_micro_batch_in_order():
    model = HybridModel(chain(), World.from_env(nb_part=2, devices="cpu"), chunks=4)
    x, y = torch.randn(10, 4), torch.arange(10)
    found = model.eval().map_outputs(x, y, lambda output, targets: (len(output), targets.tolist()))
    assert found == [(3, [0, 1, 2]), (3, [3, 4, 5]), (2, [6, 7]), (2, [8, 9])]


def test_an_output_of_map_outputs_carries_no_graph():
    model = HybridModel(chain(), World.from_env(nb_part=2, devices="cpu"), chunks=2)
    (first, second) = model.map_outputs(torch.randn(4, 4), None, lambda output, _: output)
    assert not first.requires_grad
    assert not second.requires_grad


def test_the_norm_is_that_of_all_stages_and_clipping_scales_them_alike():
    net = chain()
    model = HybridModel(net, World.from_env(nb_part=3, devices="cpu"), chunks=2)
    model.train_step(torch.randn(4, 4), torch.randn(4, 3), nn.functional.mse_loss)
    before = [p.grad.clone() for p in net.parameters()]
    expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in before]))
    torch.testing.assert_close(model.grad_norm(), expected)
    torch.testing.assert_close(model.clip_grad_norm_(0.5 * float(expected)), expected)
    for parameter, grad in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, 0.5 * grad, rtol=1e-4, atol=1e-6)


def test_its_repr_and_the_printed_plan_are_the_table_of_the_command_line():
    model = HybridModel(chain(), World.from_env(nb_part=2, devices="cpu"), chunks=4)
    head, *lines = repr(model).splitlines()
    assert head == "HybridModel(Sequential, chunks=4, schedule=1f1b)"
    assert "\n".join(lines) == str(model.plan) == table(model.plan)
    assert lines[1].split() == ["0", "2", "40", "0.6", "KiB", "60%", "cpu", "0", "...", "1"]
    assert "recompute=always, precision=bf16)" in repr(
        HybridModel(chain(), World.from_env(devices="cpu"), recompute="always", precision="bf16")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((chain(),), r"world= .*HybridModel\(net, World.from_env\(nb_part=2\)"),
        ((chain(), None), "missing argument world="),
        ((chain(), 2), "world= must be a World, not 2: "),
        ((lambda x: x, World()), r"net= must be a torch.nn.Module, not <function"),
        ((TwoInputs, World()), "not the class TwoInputs"),
        ((chain(), World(), 4), "options= must be a PipelineOptions, not 4; "),
    ],
    ids=lambda value: value if isinstance(value, str) else "arguments",
)
def test_a_wrong_argument_is_one_line_with_the_right_call(arguments, message):
    with pytest.raises(ConfigError, match=message):
        HybridModel(*arguments)


def test_chunks_that_are_no_number_are_one_line():
    with pytest.raises(ConfigError, match="chunks='4' must be a whole number of at least 1"):
        HybridModel(chain(), World(), chunks="4")


def test_what_a_module_has_and_it_has_not_says_where_it_is():
    model = HybridModel(nn.Sequential(chain(), nn.Linear(3, 3)), World())
    for name in ("to", "cuda", "half"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': its layers are on"):
            getattr(model, name)
    with pytest.raises(AttributeError, match=r"'forward': call model\(inputs\)"):
        _ = model.forward
    with pytest.raises(AttributeError, match=r"model\.net\.append"):
        _ = model.append
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = model.nonsense
    assert not hasattr(model, "forward")


def test_it_lists_modules_and_buffers_and_freezes_as_the_module_does():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = HybridModel(net, World())
    assert list(model.modules()) == list(net.modules())
    assert dict(model.named_modules()) == dict(net.named_modules())
    assert list(map(id, model.buffers())) == list(map(id, net.buffers()))
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in net.named_buffers()]
    assert model.requires_grad_(False) is model
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_a_step_in_inference_mode_says_that_it_is_on():
    model = HybridModel(chain(), World())
    x = torch.randn(4, 4)
    with torch.inference_mode(), pytest.raises(UserError, match=r"torch\.inference_mode\(\)"):
        model.train_step(x, x[:, :3], nn.functional.mse_loss)
    with torch.no_grad():
        model.train_step(x, x[:, :3], nn.functional.mse_loss)
    assert model.net[0].weight.grad is not None


def test_the_package_lists_its_public_names():
    assert set(hybridtrain.__all__) < set(dir(hybridtrain))
    assert not {"Any", "import_module", "TYPE_CHECKING"} & set(dir(hybridtrain))


def test_copying_or_pickling_it_says_what_to_do_instead():
    model = HybridModel(chain(), World.from_env(nb_part=2, devices="cpu"))
    with pytest.raises(TypeError, match=r"copy\.deepcopy\(model\.net\)"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"save model\.state_dict\(\)"):
        pickle.dumps(model)
    assert copy.deepcopy(model.net)(torch.randn(2, 4)).shape == (2, 3)


def test_a_world_is_its_own_copy_and_does_not_pickle():
    world = World.from_env(devices="cpu")
    assert copy.deepcopy(world) is world
    with pytest.raises(TypeError, match=r"call World\.from_env\(\) in the other process"):
        pickle.dumps(world)


def test_an_unknown_engine_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="engine=locale is unknown; did you mean 'local'"):
        HybridModel(chain(), World.from_env(devices="cpu", engine="locale"))


@pytest.mark.parametrize("engine", ["local", "distributed"])
def test_a_model_that_is_not_cut_runs_in_the_callers_thread(engine):
    threads = []

    class Noted(nn.Linear):
        def forward(self, x):
            threads.append(threading.current_thread())
            return super().forward(x)

    world = World.from_env(devices="cpu", engine=engine)
    model = HybridModel(nn.Sequential(Noted(4, 4)), world, chunks=2)
    model.train_step(torch.randn(4, 4), None, lambda output, _: output.square().mean())
    model(torch.randn(4, 4))
    assert set(threads) == {threading.main_thread()}


def test_a_step_that_fails_in_a_model_that_is_not_cut_says_where_and_leaves_nothing_behind():
    kept = []

    class Fails(nn.Linear):
        fails = True

        def forward(self, x):
            if self.fails and len(kept) == 3:
                raise ValueError("three")
            kept.append(weakref.ref(x))
            return super().forward(x)

    net = nn.Sequential(nn.Linear(1, 1), Fails(1, 1))
    # all forwards come before the first backward
    model = HybridModel(net, World.from_env(devices="cpu"), chunks=4, schedule="gpipe")
    batch = torch.arange(4.0).reshape(4, 1), None, lambda output, _: output.square().mean()
    try:
        model.train_step(*batch)
    except ValueError as error:
        notes = error.__notes__
    assert "in layer '1'" in notes[0]
    assert notes[1] == "in the forward of micro-batch 3 on stage 0 (0 to 1)"
    assert [one() for one in kept] == [None] * 3  # autograd's graphs are gone, too
    net[1].fails = False
    assert model.train_step(*batch).loss.isfinite()
