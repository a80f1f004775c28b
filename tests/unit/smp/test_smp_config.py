"""The configuration of smp 1.x: what each key means, and one clear error for each mistake."""

import json

import pytest
import torch
from support.smp_names import CONFIG
from torch import nn

from hybridtrain.cli import main
from hybridtrain.errors import BatchError, ConfigError, argument, naming, phrase, setting
from hybridtrain.smp import SplitDataset, StepOutput, config_from_distribution, step
from hybridtrain.smp.config import NAMING, parse, read
from hybridtrain.smp.model import inputs_of
from hybridtrain.smp.step import collected, names_backward

PARAMETERS = {
    "partitions": 4,
    "microbatches": 8,
    "placement_strategy": "spread",
    "pipeline": "simple",
    "optimize": "speed",
    "ddp": True,
    "active_microbatches": 3,
}


def distribution(mpi=None, **parameters):
    return {
        "smdistributed": {
            "modelparallel": {"enabled": True, "parameters": {**PARAMETERS, **parameters}}
        },
        "mpi": {"enabled": True, "processes_per_host": 8, **(mpi or {})},
    }


def test_keys_mean_what_they_mean_in_smp():
    config = parse(PARAMETERS)
    options = config.options(5)
    assert (options.chunks, options.schedule, options.max_inflight) == (8, "gpipe", 3)
    assert (options.memory_weight, options.seed, config.inner) == (0.2, 5, "dp")
    assert config.engine == "distributed"
    assert parse({"pipeline_parallel_degree": 1}).engine == "local"
    assert parse({"pipeline_parallel_degree": 1}).memory_weight == 0.8
    for strategy, inner in (("cluster", "pp"), ("DPT", "pp"), ("TPD", "dp"), ("PTD", "dp")):
        assert parse({"partitions": 2, "placement_strategy": strategy}).inner == inner
    manual = parse({"partitions": 2, "auto_partition": False, "default_partition": 1})
    assert (manual.options(0).split, manual.options(0).default_partition) == ("manual", 1)
    assert parse({"partitions": 2, "bf16": True}).precision == "bf16"
    own = parse({"partitions": 2, "hybridtrain": {"engine": "local", "stages_per_device": 2}})
    assert (own.engine, own.options(0).stages_per_device) == ("local", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree=2: tensor parallelism is not"),
        ({"sharded_data_parallel_degree": 4}, "sharded data parallelism is not supported"),
        ({"offload_activations": True}, "offloading activations is not supported"),
        ({"horovod": True}, "Horovod is not supported"),
        ({"microbatch": 4}, "microbatch is unknown: did you mean 'microbatches'"),
        ({"microbatches": 0}, "microbatches=0 must be a whole number"),
        ({"pipeline": "1f1b"}, "pipeline=1f1b is unknown"),
        ({"placement_strategy": "near"}, "placement_strategy='near' must be"),
        ({"auto_partition": False}, "needs default_partition="),
        ({"fp16": True, "bf16": True}, "cannot both be true"),
        ({"ddp_dist_backend": "smddp"}, "ddp_dist_backend=smddp is unknown"),
        ({"pipeline_parallel_degree": 2}, "partitions and pipeline_parallel_degree differ"),
        ({"hybridtrain": {"chunk": 1}}, "hybridtrain.chunk is unknown"),
        ({"hybridtrain": {"engine": "gpu"}}, "hybridtrain.engine=gpu is unknown"),
    ],
)
def test_a_mistake_is_one_clear_error(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse({**PARAMETERS, **changes})


def test_the_degree_is_required():
    with pytest.raises(ConfigError, match=r"pipeline_parallel_degree .* is missing"):
        parse({"microbatches": 2})


def test_the_environment_variable_has_json_or_a_file(tmp_path):
    path = tmp_path / "distribution.json"
    path.write_text(json.dumps(distribution()))
    assert read(str(path)) == PARAMETERS
    assert read(json.dumps(PARAMETERS)) == PARAMETERS
    with pytest.raises(ConfigError, match="is not JSON"):
        read("{")
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        read(str(tmp_path / "absent"))


def test_a_distribution_becomes_a_torchrun_line_and_a_configuration():
    mpi = {"custom_mpi_options": "--mca btl_vader_single_copy_mechanism none -x FI_PROVIDER=efa"}
    launch = config_from_distribution(distribution(mpi), instance_count=2)
    assert launch.replicas == 4
    command = launch.command("train.py")
    assert "FI_PROVIDER=efa torchrun --nnodes=2" in command
    assert command.endswith("--nproc-per-node=8 train.py")
    text = command.partition("'")[2].partition("'")[0]
    assert parse(json.loads(text)) == parse(PARAMETERS)
    assert launch.config.options(0).schedule == "gpipe"
    assert launch.config.inner == "dp"
    assert {"optimize", "ddp", "mpi.enabled"} <= launch.notes.keys()
    assert any("btl_vader" in key for key in launch.notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (distribution(mpi={"processes_per_host": 6}), "processes_per_host=6 .*degree=4"),
        (distribution(mpi={"processes_per_host": 0}), "processes_per_host=0 must be"),
        (distribution(mpi={"hosts": 1}), "mpi.hosts is unknown"),
        ({"mpi": {}}, 'distribution has no "smdistributed"'),
        ({"smdistributed": {"dataparallel": {"enabled": True}}}, "smdistributed.dataparallel"),
        ({"pytorchddp": {}}, "unknown key 'pytorchddp'"),
    ],
)
def test_a_distribution_that_does_not_fit_is_one_clear_error(given, message):
    with pytest.raises(ConfigError, match=message):
        config_from_distribution(given)


@pytest.mark.parametrize(
    "place",
    [
        "smdistributed.modelparallel",
        "smdistributed.modelparallel.parameters",
        "mpi",
        "mpi.custom_mpi_options",
        "instance_count",
    ],
)
@pytest.mark.parametrize("value", [3.5, [1], None, "'"])
def test_a_value_of_another_kind_is_one_error_that_names_it(place, value):
    whole = {"instance_count": 1, **distribution({"enabled": True, "processes_per_host": 4})}
    *parents, last = place.split(".")
    inner = whole
    for name in parents:
        inner = inner[name]
    inner[last] = value
    if place == "mpi.custom_mpi_options" and value is None:
        config_from_distribution(whole)
        return
    with pytest.raises(ConfigError, match=place):
        config_from_distribution(whole)


def test_the_command_smp_config(tmp_path, capsys):
    path = tmp_path / "distribution.json"
    path.write_text(json.dumps(distribution()))
    assert main(["smp-config", str(path), "--script", "run.py"]) == 0
    printed = capsys.readouterr().out
    assert "1 x 8 processes, 2 replicas of 4 stages" in printed
    assert "--nproc-per-node=8 run.py" in printed
    path.write_text("{'enabled': True}")
    assert main(["smp-config", str(path)]) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert main(["smp-config"]) == 2


def test_split_data_set_has_contiguous_parts():
    data = SplitDataset(list(range(10)), {"0": 1 / 3, "1": 1 / 3, "2": 1 / 3})
    parts = []
    for name in "012":
        data.select(name)
        parts.append([data[i] for i in range(len(data))])
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(ConfigError, match="partition '3'"):
        data.select("3")
    with pytest.raises(ConfigError, match="10 samples"):
        SplitDataset(list(range(10)), {"a": 8, "b": 8})


def finish(model, loss):
    model.backward(loss)


def test_a_step_trains_if_its_code_or_that_of_its_helpers_names_backward():
    def direct(model, x):
        model.backward(model(x))

    def helper(model, x):
        finish(model, model(x))

    def enclosed(model, x):
        return [direct(model, one) for one in x]

    def evaluates(model, x):
        return nn.functional.relu(model(x))

    assert [names_backward(f) for f in (direct, helper, enclosed)] == [True] * 3
    assert not names_backward(evaluates)


def test_outputs_of_micro_batches_of_other_sizes_are_weighed():
    output = StepOutput([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    assert float(output.reduce_mean()) == pytest.approx(2.0)
    assert float(output.reduce_sum()) == 5.0
    assert StepOutput([torch.tensor(1), torch.tensor(2)]).reduce_mean() == 1.5
    with pytest.raises(BatchError, match="the same structure"):
        collected([(1, 2), (1,)], [1, 1])


def test_the_arguments_of_a_call_are_the_inputs_of_a_batch():
    class Net(nn.Module):
        def forward(self, x, mask=None, **more):
            return x

    x = torch.ones(2)
    assert inputs_of(Net(), (x,), {}) is x
    found = inputs_of(Net(), (x,), {"mask": None, "other": 1})
    assert list(found) == ["x", "mask", "other"]
    assert inputs_of(nn.Sequential(nn.Identity()), ((x, x),), {}) == (x, x)
    assert list(inputs_of(Net(), ((x, x),), {})) == ["x"]


def test_messages_of_the_library_name_the_keys_of_smp():
    with naming(NAMING):
        assert argument("chunks") == "microbatches="
        assert argument("nb_part") == "pipeline_parallel_degree="
        assert setting("schedule", "1f1b") == "pipeline=interleaved"
        assert setting("precision", "bf16") == "hybridtrain.precision=bf16"
        assert phrase("HybridModel") == "smp.DistributedModel"


def test_a_wrong_value_of_a_setting_is_named_as_it_was_given():
    with pytest.raises(ConfigError, match=r"^hybridtrain\.recompute=chunks=3 "), naming(NAMING):
        parse({"pipeline_parallel_degree": 2, "hybridtrain": {"recompute": "chunks=3"}}).options(0)
    with pytest.raises(ConfigError, match=r"^recompute=chunks=3 "):
        parse({"pipeline_parallel_degree": 2, "hybridtrain": {"recompute": "chunks=3"}}).options(0)


@pytest.mark.parametrize("name", CONFIG)
def test_each_documented_key_is_accepted(name):
    config = parse({"pipeline_parallel_degree": 2, name: CONFIG[name]})
    assert config.pipeline_parallel_degree == 2


def test_keys_of_sharded_data_parallelism_do_not_switch_it_on():
    sharded = {name: value for name, value in CONFIG.items() if name.startswith("sdp_")}
    with pytest.raises(ConfigError, match="sharded data parallelism is not supported"):
        parse({"partitions": 2, **sharded, "sharded_data_parallel_degree": 2})


def test_a_step_in_a_class_body_is_bound_where_its_first_parameter_is_self():
    class Trains:
        @step
        def of_self(self, batch):
            return batch

        @step
        def of_model(model, batch):  # noqa: N805
            return batch

    trainer = Trains()
    assert trainer.of_self.args == (trainer,)
    assert trainer.of_model is Trains.of_model
