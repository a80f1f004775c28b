"""TRL's trainers, which build their loss from other outputs than the model's loss."""

import copy
import logging

import pytest
import torch
from support.cases import installed, thorough
from support.hf import VOCABULARY, llama

from hybridtrain import pipelined

trl = installed("trl")
datasets = installed("datasets")
peft = installed("peft")
transformers = installed("transformers")

pytestmark = pytest.mark.usefixtures("seeded")

CLOSE = {"rtol": 1e-6, "atol": 1e-6}
COMPARED = ("loss", "grad_norm", "mean_token_accuracy", "rewards/margins")
WORDS = [f"w{number}" for number in range(VOCABULARY - 3)]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    numbers = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def rows(*names):
    g = torch.Generator().manual_seed(0)

    def text():
        length = int(torch.randint(3, 10, (), generator=g))
        return " ".join(WORDS[n] for n in torch.randint(len(WORDS), (length,), generator=g))

    return datasets.Dataset.from_list(
        [{name: ("" if name == "prompt" else " ") + text() for name in names} for _ in range(18)]
    )


def piped(model):
    return pipelined(model, devices=["cpu:0", "cpu:1"], chunks=3)


def lora():
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


def run(folder, tokenizer, wrap, adapter, data, preferences=False, **more):
    """Trains; returns the numbers of the log and the trained weights."""
    torch.manual_seed(0)
    model, config = llama(), None
    if adapter == "made before":
        model = wrap(peft.get_peft_model(model, lora()))
    elif adapter == "made after":
        model = peft.get_peft_model(wrap(model), lora())
    else:
        model, config = wrap(model), lora() if adapter == "peft_config" else None
    kind, config_of, reference = trl.SFTTrainer, trl.SFTConfig, {}
    if preferences:
        kind, config_of = trl.DPOTrainer, trl.DPOConfig
        reference = {} if config else {"ref_model": copy.deepcopy(model)}
    length = None if more.get("padding_free") else 32
    trainer = kind(
        model=model,
        args=settings(config_of, folder, num_train_epochs=2, max_length=length, **more),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=config,
        **reference,
    )
    torch.manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:  # zero at the start, so that lora_A would get no gradient
            torch.nn.init.normal_(parameter, std=0.1)
    trainer.train()
    log = [{k: v for k, v in entry.items() if k in COMPARED} for entry in trainer.state.log_history]
    trained = trainer.model.named_parameters()
    return log, {name: p.detach() for name, p in trained if p.requires_grad}


def assert_alike(tmp_path, *arguments, **options):
    plain = run(tmp_path, arguments[0], lambda model: model, *arguments[1:], **options)
    pipe = run(tmp_path, arguments[0], piped, *arguments[1:], **options)
    assert any("loss" in entry for entry in plain[0])
    torch.testing.assert_close(pipe, plain, **CLOSE)


@pytest.mark.parametrize("adapter", ["peft_config", "made before", "made after", "none"])
def test_fine_tuning(tmp_path, tokenizer, adapter):
    assert_alike(tmp_path, tokenizer, adapter, rows("text"))


def test_losses_of_the_completion_alone(tmp_path, tokenizer):
    data = rows("prompt", "completion")
    assert_alike(tmp_path, tokenizer, "peft_config", data, completion_only_loss=True)


def test_packed_sequences(tmp_path, tokenizer):
    more = {"packing": True, "packing_strategy": "wrapped"}
    assert_alike(tmp_path, tokenizer, "peft_config", rows("text"), **more)


@pytest.mark.parametrize("option", ["packing", *thorough(["padding_free"])])
def test_sequences_in_one_row_are_not_cut_and_that_is_said(tmp_path, tokenizer, caplog, option):
    with caplog.at_level(logging.WARNING, "hybridtrain"):
        assert_alike(tmp_path, tokenizer, "peft_config", rows("text"), **{option: True})
    assert "one device works at a time" in caplog.text


@pytest.mark.parametrize("adapter", ["peft_config", "none"])
def test_preferences(tmp_path, tokenizer, adapter):
    """The reference model is the model without its adapter, or a copy."""
    data = rows("prompt", "chosen", "rejected")
    assert_alike(tmp_path, tokenizer, adapter, data, preferences=True)


def settings(kind, folder, **more):
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=6,
        learning_rate=0.05,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **more,
    )


def rewards(folder, tokenizer, model):
    return trl.RewardTrainer(
        model=model,
        args=settings(trl.RewardConfig, folder, max_steps=3),
        train_dataset=rows("chosen", "rejected"),
        processing_class=tokenizer,
    )


def policy(folder, tokenizer, model):
    prompts = [{"prompt": " ".join(WORDS[i : i + 4])} for i in range(18)]
    return trl.GRPOTrainer(
        model=model,
        args=settings(
            trl.GRPOConfig, folder, max_steps=3, num_generations=3, max_completion_length=6
        ),
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
    )


def scorer():
    config = llama().config
    config.num_labels = 1
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(config)


@pytest.mark.parametrize(("trainer_of", "make"), [(rewards, scorer), (policy, llama)])
def test_trainers_of_rewards_and_of_policies(tmp_path, tokenizer, trainer_of, make):
    """The second one generates texts between its steps."""
    results = []
    for wrap in (lambda model: model, piped):
        trainer = trainer_of(tmp_path, tokenizer, wrap(make()))
        torch.manual_seed(1)
        trainer.train()
        log = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
        results.append((log, weights))
    assert any(results[0][0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
