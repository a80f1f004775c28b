"""Parameter groups and several optimizers: which parameter is where, and that runs resume."""

import pytest
import torch
from support.training import assert_same, assert_same_run, cosine, moments, plain_net, trainer

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.cli.run.components import build_model_optimizer
from hybridtrain.errors import ConfigError
from hybridtrain.step import CombinedOptimizer, parameter_groups

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.02, "weight_decay": 0.5}
SGD_FOR_2 = {"match": "2.*", "_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}


def model():
    return HybridModel(plain_net(), World.from_env(nb_part=2, devices="cpu"))


def named(ours, optimizer):
    """Returns the parameters' names and the settings of each group."""
    names = {id(p): name for name, p in ours.named_parameters()}
    return [
        ([names[id(p)] for p in group["params"]], group["lr"], group.get("weight_decay"))
        for group in optimizer.param_groups
    ]


def test_a_parameter_is_in_the_group_of_the_first_rule_that_matches():
    ours = model()
    rules = [{"match": "*.bias", "weight_decay": 0.0}, {"match": ["2.*", "4.*"], "lr": 0.1}]
    optimizer = build_model_optimizer({**ADAMW, "groups": rules}, ours)
    assert named(ours, optimizer) == [
        (["0.bias", "2.bias", "4.bias"], 0.02, 0.0),
        (["2.weight", "4.weight"], 0.1, 0.5),
        (["0.weight"], 0.02, 0.5),
    ]


def test_each_block_has_its_share_of_the_learning_rate():
    ours = model()
    rules = [{"match": "*.bias", "lr": 0.2}]
    optimizer = build_model_optimizer({**ADAMW, "groups": rules, "layer_decay": 0.5}, ours)
    rates = {names[0]: lr for names, lr, _ in named(ours, optimizer)}
    assert rates == pytest.approx(
        {"0.bias": 0.05, "2.bias": 0.1, "4.bias": 0.2}
        | {"0.weight": 0.005, "2.weight": 0.01, "4.weight": 0.02}
    )
    assert {g["name"] for g in optimizer.param_groups} == {"0", "2", "4", "0.0", "2.0", "4.0"}


def test_two_optimizers_do_what_each_does_alone():
    config = {**ADAMW, "groups": [SGD_FOR_2]}
    ours, theirs = trainer().model, trainer().model
    combined = build_model_optimizer(config, theirs)
    assert isinstance(combined, CombinedOptimizer)
    parameters = dict(ours.named_parameters())
    sgd = torch.optim.SGD([parameters["2.weight"], parameters["2.bias"]], lr=0.1, momentum=0.9)
    rest = [p for name, p in parameters.items() if not name.startswith("2.")]
    adamw = torch.optim.AdamW(rest, lr=0.02, weight_decay=0.5)
    inputs, targets = torch.randn(8, 6), torch.randint(3, (8,))
    for _ in range(4):
        for each in (ours, theirs):
            each.train_step(inputs, targets, torch.nn.functional.cross_entropy)
        combined.step()
        combined.zero_grad()
        for each in (sgd, adamw):
            each.step()
            each.zero_grad()
    assert_same(theirs.state_dict(), ours.state_dict(), "weights")


@pytest.mark.parametrize("groups", [[SGD_FOR_2], [{"match": "*.bias", "weight_decay": 0.0}]])
@pytest.mark.quick_cases(1)
def test_groups_and_several_optimizers_resume_exactly(groups, tmp_path):
    config = {**ADAMW, "groups": groups}

    def make(**options):
        made = trainer(**options)
        optimizer = build_model_optimizer(config, made.model)
        return Trainer(
            made.model, optimizer, made.loss_fn, made.train, made.options,
            lr_schedule=cosine(2, 9)(optimizer), store=made.store, callbacks=[made.recorder],
            evaluation=made.evaluation, metrics=made.metrics,
        )  # fmt: skip

    store = CheckpointStore(tmp_path)
    whole = make()
    whole.fit()
    first = make(steps=4, store=store)
    first.fit()
    again = make()
    again.resume(store.newest())
    again.fit()
    assert_same_run(again, whole)
    assert len(moments(again)) == len(moments(whole)) > 0
    rates = [[g["lr"] for g in each.optimizer.param_groups] for each in (again, whole)]
    assert rates[0] == rates[1]


def test_mistakes_name_the_key():
    ours = model()
    with pytest.raises(ConfigError, match=r"groups\.match=head\.\* matches no parameter"):
        build_model_optimizer({**ADAMW, "groups": [{"match": "head.*"}]}, ours)
    with pytest.raises(ConfigError, match=r"did you mean optim\.groups\.0\.weight_decay"):
        build_model_optimizer({**ADAMW, "groups": [{"match": "*", "weight_decy": 0.1}]}, ours)
    with pytest.raises(ConfigError, match="must be a mapping with the key match"):
        build_model_optimizer({**ADAMW, "groups": [{"lr": 0.1}]}, ours)
    with pytest.raises(ConfigError, match="layer_decay=2"):
        parameter_groups(ours, lr=0.1, layer_decay=2)
    weight = next(iter(ours.parameters()))
    with pytest.raises(ConfigError, match="hold the same parameter"):
        CombinedOptimizer([torch.optim.SGD([weight], 0.1), torch.optim.SGD([weight], 0.1)])
