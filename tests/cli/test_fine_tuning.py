"""Fine-tuning a chat model with LoRA, from the files to what PEFT and transformers load."""

import json
import re
from pathlib import Path

import pytest
import torch
from cli_runs import fail, succeed
from safetensors.torch import load_file, save_file
from support.cases import installed
from support.launch import SMALL, forked_command
from support.small_hub import write_bert, write_chats, write_gpt2, write_llama, write_reviews

from hybridtrain import World
from hybridtrain.cli import main
from hybridtrain.data import TrainLoader
from hybridtrain.datasets import chat
from hybridtrain.models import lora, transformers_model
from hybridtrain.options import LoaderOptions

peft = installed("peft")

# 9 steps in an epoch. After more steps the adapters of float32 and float64 differ in plain PEFT too
STEPS, STOP, BATCH = 10, 6, 8
RUN = [
    *(
        "recipe=sft_chat",
        "model.source=./llama",
        "data.path=data/chats.jsonl",
        "model.dtype=float32",
    ),
    *("world.devices=cpu", f"data.batch_size={BATCH}", "data.max_len=24", "optim.lr=1e-2"),
    # a gradient that is almost 0 does not make a step of its rounding errors
    "optim.eps=1e-4",
    *("lr_schedule=constant", "lr_schedule.warmup_steps=0", "trainer.epochs=null"),
    *("trainer.log_every=1", "trainer.eval_every=null", "checkpoint.every_steps=null"),
    *("pipeline.chunks=2", "pipeline.split=uniform", "trainer.clip_norm=null", "world.replicas=2"),
]


@pytest.fixture(autouse=True)
def files():
    write_llama(Path("llama"))
    write_chats(Path("data/chats.jsonl"), 76)


def trained_by_peft(steps):
    """The adapter of a plain loop over the same batches, from the same first values."""
    from transformers import AutoModelForCausalLM

    source = {"source": "./llama", "task": "causal_lm"}
    data = chat("data/chats.jsonl", "./llama", max_len=24)
    torch.manual_seed(0)
    first = lora(transformers_model(**source), rank=16, alpha=32, targets="all-linear")
    # not sdpa: plain transformers leaves the mask out of a batch without padding
    base = AutoModelForCausalLM.from_pretrained("./llama", attn_implementation="eager")
    config = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    net = peft.get_peft_model(base, config).train()
    values = {f"base_model.model.{n}": v for n, v in first.state_dict().items() if "lora" in n}
    assert net.load_state_dict(values, strict=False).unexpected_keys == []
    optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad],
        lr=1e-2,
        eps=1e-4,
        weight_decay=0.0,
        fused=True,  # as the command line's
    )
    world = World.from_env(devices="cpu")
    options = LoaderOptions(collate=data.collate)
    loader = TrainLoader(data.train, BATCH, world, seed=0, options=options)
    done = 0
    while done < steps:
        for inputs, targets in loader:
            logits = net(**inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break
    return net


@pytest.mark.parametrize(
    ("processes", "engine"),
    [
        pytest.param(1, "local", id="one-process"),
        pytest.param(2, "local", id="two-processes"),
        pytest.param(4, "distributed", id="a-process-for-each-stage"),
    ],
)
@pytest.mark.thorough
def test_a_run_that_stops_in_an_epoch_and_goes_on_elsewhere_exports_the_adapter_of_plain_peft(
    processes, engine, capfd
):
    if engine == "distributed":
        write_gpt2(Path("llama"))  # whose trace takes less time, in each of the processes
    first = [*RUN, f"trainer.steps={STOP}", "pipeline.nb_part=2", f"world.engine={engine}"]
    if processes == 1:
        succeed(capfd, *first)
    else:
        forked_command(processes, first, Path("said"))
    on = [*RUN, f"trainer.steps={STEPS}", "pipeline.nb_part=3", "world.engine=local"]
    said = succeed(capfd, *on)
    assert f"resumed from outputs/sft_chat/checkpoints/step_{STOP:08d}" in said
    assert "truncates " in said
    assert "learned tokens" in said
    run = Path("outputs/sft_chat")
    result = json.loads((run / "summary.json").read_text())["eval"]
    assert result["perplexity"] == pytest.approx(torch.tensor(result["loss"]).exp().item())
    checkpoint = run / f"checkpoints/step_{STEPS:08d}"
    saved = load_file(checkpoint / "model.safetensors")
    assert saved
    assert all(".lora_" in name for name in saved)
    base = json.loads((checkpoint / "state.json").read_text())["base"]
    assert base["source"] == "./llama"

    # uninterrupted, in one stage: bitwise the same
    succeed(capfd, *RUN, f"trainer.steps={STEPS}", "pipeline.nb_part=1", "run_name=whole")
    whole = load_file(f"outputs/whole/checkpoints/step_{STEPS:08d}/model.safetensors")
    assert list(whole) == list(saved)
    assert all(torch.equal(value, saved[name]) for name, value in whole.items())

    from transformers import AutoModelForCausalLM, AutoTokenizer

    succeed(capfd, "export", "run_name=sft_chat", "format=peft")
    folder = run / f"export/step_{STEPS:08d}_adapter"
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained("./llama", attn_implementation="eager"), folder
    ).eval()
    plain = trained_by_peft(STEPS).eval()
    ours, theirs = loaded.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    moved = 0.0
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)
        moved = max(moved, value.abs().max().item() if "lora_B" in name else 0)
    assert moved > 0.01

    succeed(capfd, "export", "run_name=sft_chat", "format=transformers")
    merged = run / f"export/step_{STEPS:08d}"
    tokenizer = AutoTokenizer.from_pretrained(merged)
    asked = [{"role": "user", "content": "good film"}]
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    net = AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            net(**inputs).logits, loaded(**inputs).logits, rtol=1e-4, atol=1e-5
        )
    answers = net.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert answers.shape[0] == 1


def test_what_is_wrong_in_a_chat_file_is_fixed_by_the_key_that_the_error_names(capfd):
    turns = [{"role": "user", "content": "good film"}, {"role": "assistant", "content": "nice"}]
    bad = [*turns[:1], {"role": "assistant", "content": "bad"}]
    tools = [{"type": "function", "function": {"name": "story", "parameters": {}}}]
    files = {
        "messages=": {"chosen": turns, "rejected": bad},
        "tools=": {"conversations": [{"from": "human", "value": "good"},
                                     {"from": "gpt", "value": "nice"}], "tools": tools},
    }  # fmt: skip
    for key, sample in files.items():
        Path("data/chats.jsonl").write_text((json.dumps(sample) + "\n") * 20)
        said = fail(capfd, *RUN, "trainer.steps=1", "--dry-run")
        (way_out,) = re.findall(rf"(?:set|by) (data\.{key}\w+)", said)
        said = succeed(capfd, *RUN, "trainer.steps=1", "--dry-run", way_out)
        assert "data: 19 samples to train on, 1 held out" in said
    assert "ShareGPT (conversations); columns not used: tools" in said


def test_peft_loads_the_adapter_that_was_evaluated(capfd):
    from transformers import AutoModelForCausalLM

    write_gpt2(Path("llama"))  # with tied weights, and layers of Conv1D
    succeed(capfd, *RUN, "trainer.steps=2", "pipeline.nb_part=2", "data.pack=true")
    run = Path("outputs/sft_chat")
    result = json.loads((run / "summary.json").read_text())["eval"]
    assert result["perplexity"] == pytest.approx(torch.tensor(result["loss"]).exp().item())
    saved = load_file(run / "checkpoints/step_00000002/model.safetensors")
    assert saved
    assert all(".lora_" in name for name in saved)
    succeed(capfd, "export", "run_name=sft_chat", "format=peft")
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained("./llama", attn_implementation="eager"),
        run / "export/step_00000002_adapter",
    ).eval()
    data = chat("data/chats.jsonl", "./llama", max_len=24, pack=True)
    inputs, targets = data.collate([data.eval[i] for i in range(len(data.eval))])
    with torch.no_grad():
        logits = loaded(**inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(result["loss"], rel=1e-5)


def test_init_from_says_where_the_base_of_a_run_was_moved(copied, capfd):
    adapted = [*SMALL, "model.lora.targets=all-linear", "run_name=adapted"]
    succeed(capfd, *adapted, "init_from=outputs/digits", "trainer.steps=1")
    trained = json.loads(Path("outputs/adapted/summary.json").read_text())["eval"]
    copied.rename("first")
    said = fail(capfd, "evaluate", "run_name=adapted")
    assert all(name in said for name in ("step_00000001", "outputs/digits", "init_from="))
    capfd.readouterr()
    assert main(["evaluate", "run_name=adapted", "init_from=first"]) == 0
    assert json.loads(capfd.readouterr().out)["loss"] == trained["loss"]
    said = fail(capfd, "evaluate", "run_name=adapted", "init_from=outputs/nothing")
    assert "init_from=outputs/nothing" in said


@pytest.mark.thorough
def test_a_run_with_the_adapter_of_another_has_its_base(copied, capfd):
    adapted = [*SMALL, "model.lora.targets=all-linear"]
    succeed(capfd, *adapted, "run_name=first", "init_from=outputs/digits", "trainer.steps=1")
    for steps in (1, 2):
        second = ("run_name=second", "init_from=outputs/first", f"trainer.steps={steps}")
        succeed(capfd, *adapted, *second)
    state = json.loads(Path("outputs/second/checkpoints/step_00000002/state.json").read_text())
    assert state["base"]["source"] == "outputs/digits"


@pytest.mark.thorough
def test_the_key_that_named_a_base_says_where_it_was_moved(capfd):
    write_gpt2(Path("llama"))
    short = [*RUN, "pipeline.nb_part=1"]
    succeed(capfd, *short, "trainer.steps=2")
    trained = json.loads(Path("outputs/sft_chat/summary.json").read_text())["eval"]
    Path("llama").rename("moved")
    said = fail(capfd, "export", "run_name=sft_chat", "format=peft")
    assert all(name in said for name in ("step_00000002", "./llama", "init_from=", "model.source="))
    capfd.readouterr()
    assert main(["evaluate", "run_name=sft_chat", "model.source=./moved"]) == 0
    assert json.loads(capfd.readouterr().out)["loss"] == trained["loss"]
    succeed(capfd, "export", "run_name=sft_chat", "format=peft", "init_from=./moved")
    # other weights are refused, whatever names them
    write_gpt2(Path("other"))
    weights = load_file("other/model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, "other/model.safetensors")
    said = fail(capfd, "evaluate", "run_name=sft_chat", "model.source=./other")
    assert all(name in said for name in ("step_00000002", "./llama", "./other"))


@pytest.mark.thorough
def test_a_key_that_named_a_base_still_in_its_place_changes_the_run_like_any_other(capfd):
    write_gpt2(Path("llama"))
    short = [*RUN, "pipeline.nb_part=1"]
    succeed(capfd, *short, "trainer.steps=1")
    write_gpt2(Path("other"))
    weights = load_file("other/model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, "other/model.safetensors")
    for key in ("data.tokenizer", "model.source"):
        keys = [f"{key}=./other", "trainer.steps=2"]
        said = fail(capfd, *short, *keys)
        assert all(name in said for name in (key, "./llama", "./other"))
    said = fail(capfd, "evaluate", "run_name=sft_chat", "model.source=./other")
    assert all(name in said for name in ("model.source", "./llama", "./other"))


@pytest.mark.thorough
def test_a_run_goes_on_with_its_moved_base_and_names_the_new_place_from_then_on(capfd):
    write_gpt2(Path("llama"))
    short = [*RUN, "pipeline.nb_part=1"]
    succeed(capfd, *short, "trainer.steps=2")
    Path("llama").rename("moved")
    said = succeed(capfd, *short, "trainer.steps=3", "model.source=./moved")
    assert "resumed from outputs/sft_chat/checkpoints/step_00000002" in said
    state = json.loads(Path("outputs/sft_chat/checkpoints/step_00000003/state.json").read_text())
    assert state["base"]["source"] == "./moved"
    succeed(capfd, "run_name=sft_chat", "trainer.steps=4")


@pytest.mark.thorough
def test_a_plan_counts_gradients_and_state_for_the_adapter_alone(capfd):
    write_gpt2(Path("llama"))

    def kib(*changes):
        said = succeed(capfd, "plan", *RUN, "trainer.steps=2", *changes)
        return sum(map(float, re.findall(r"([\d.]+) KiB", said)))

    base, adapted = kib("model.lora=null"), kib("model.lora.rank=1")
    assert base / 4 < adapted < base / 3  # AdamW has four numbers for each weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.lora.rank=0", "model.lora.rank=0 must be a number of at least 1"),
        ("model.lora.targets=[q_prj]", "model.lora.targets=q_prj: .* did you mean 'q_proj'?"),
        ("model.lora.ranks=4", "model.lora.ranks: .*did you mean model.lora.rank"),
        ("model.lora=8", "model.lora=8 must be true, or a mapping such as"),
        ("data.path=data/reviews.csv", "data.path=data/reviews.csv"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_mistake_in_a_setting_is_one_line(change, message, capfd):
    said = fail(capfd, *RUN, "trainer.steps=2", change)
    assert len(said.splitlines()) == 1
    assert re.search(message, said), said


@pytest.mark.thorough
def test_a_run_without_an_adapter_has_none_to_export(capfd):
    succeed(capfd, *RUN, "trainer.steps=1", "model.lora=null", "pipeline.nb_part=1")
    assert "format=peft writes the adapter of model.lora" in fail(
        capfd, "export", "run_name=sft_chat", "format=peft"
    )


def test_an_adapter_trains_on_a_base_that_was_saved_without_its_head(capfd):
    from transformers import BertModel

    write_bert(Path("bert"), layers=1)
    write_reviews(Path("reviews.jsonl"), 16)
    BertModel.from_pretrained("bert", add_pooling_layer=False).save_pretrained("bert")
    words = ["recipe=bert_classifier", "model.source=./bert", "data.path=reviews.jsonl"]
    words += ["model.lora.rank=2", "model.lora.targets=[query,value]", "data.batch_size=8"]
    words += ["data.max_len=8", "trainer.epochs=null", "trainer.steps=1", "world.devices=cpu"]
    words += ["lr_schedule.warmup_steps=0"]
    said = fail(capfd, *words)
    assert "init_from=./bert" in said
    setting = "model.lora.modules_to_save=[bert.pooler,classifier]"
    assert setting in said
    assert "done: 1 steps" in succeed(capfd, *words, setting)
