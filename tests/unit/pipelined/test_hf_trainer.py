"""Trainers of transformers, with one changed line: the same losses, norms, metrics and weights."""

import logging

import pytest
import torch
from support.cases import installed
from support.hf import Texts, bert, causal_lm, llama, padded, t5

from hybridtrain import pipelined
from hybridtrain.errors import BatchError, ConfigError

transformers = installed("transformers")
installed("accelerate")  # its Trainer needs it

pytestmark = pytest.mark.usefixtures("seeded")

COMPARED = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_exact")
CLOSE = {"rtol": 2e-6, "atol": 1e-6}
CLOSE_IN_HALF = {"rtol": 5e-3, "atol": 5e-3}


def settings(folder, seq2seq=False, **more):
    kind = transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=5,
        per_device_eval_batch_size=5,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )


def piped(model):
    return pipelined(model, devices=["cpu:0", "cpu:1"], chunks=3)


def run(folder, model, wrap, kind=None, classes=None, resume=None, before=None, **more):
    """Trains; returns the numbers of the log and the weights."""
    more_of_trainer = {k: more.pop(k) for k in ("compute_metrics", "data_collator") if k in more}
    args = settings(folder, seq2seq=kind is not None, **more)
    trainer = (kind or transformers.Trainer)(
        model=wrap(model),
        args=args,
        train_dataset=Texts(classes=classes),
        eval_dataset=Texts(rows=11, seed=1, classes=classes),
        **{"data_collator": padded, **more_of_trainer},
    )
    if before is not None:
        before(trainer)
    trainer.train(resume_from_checkpoint=resume)
    log = [{k: v for k, v in entry.items() if k in COMPARED} for entry in trainer.state.log_history]
    return log, dict(model.state_dict())


def fused(model):
    return pipelined(model, devices=["cpu:0", "cpu:1"], chunks=3, head="fused")


def assert_alike(tmp_path, make, close=CLOSE, wrap=piped, **options):
    plain = run(tmp_path / "plain", make(), lambda model: model, **options)
    pipe = run(tmp_path / "pipe", make(), wrap, **options)
    assert any(plain[0])
    torch.testing.assert_close(pipe, plain, **close)


def accuracy(prediction):
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    right = torch.as_tensor(logits).argmax(-1) == torch.as_tensor(prediction.label_ids)
    return {"accuracy": float(right.double().mean())}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"compute_metrics": accuracy},
        {"label_smoothing_factor": 0.1},
        {"prediction_loss_only": True},
    ],
    ids=["metrics", "smoothing", "loss"],
)
@pytest.mark.quick_cases("metrics")
def test_a_loss_without_logits(options, tmp_path):
    assert_alike(tmp_path, llama, wrap=fused, **options)


@pytest.mark.thorough
def test_a_loss_without_logits_in_half_precision(tmp_path):
    assert_alike(tmp_path, llama, CLOSE_IN_HALF, wrap=fused, bf16=True)


def test_a_causal_language_model(tmp_path):
    assert_alike(tmp_path, llama, load_best_model_at_end=True)


@pytest.mark.thorough
def test_tied_weights(tmp_path):
    assert_alike(tmp_path, lambda: llama(tie_word_embeddings=True))


@pytest.mark.thorough
def test_bf16(tmp_path):
    assert_alike(tmp_path, llama, CLOSE_IN_HALF, bf16=True)


@pytest.mark.thorough
def test_gradient_checkpointing(tmp_path):
    assert_alike(tmp_path, llama, gradient_checkpointing=True)


@pytest.mark.thorough
def test_label_smoothing_computes_the_loss_outside_of_the_model(tmp_path):
    assert_alike(tmp_path, llama, label_smoothing_factor=0.1)


def test_a_classifier_that_ignores_the_number_of_items(tmp_path):
    assert_alike(tmp_path, bert, classes=3, compute_metrics=accuracy)


def test_an_encoder_and_a_decoder_that_generate_in_their_evaluation(tmp_path):
    def exact(prediction):
        ids = torch.as_tensor(prediction.predictions)
        return {"exact": float(ids.sum())}

    assert_alike(
        tmp_path,
        t5,
        kind=transformers.Seq2SeqTrainer,
        compute_metrics=exact,
        predict_with_generate=True,
        generation_max_length=8,
    )


def test_texts_in_one_row_without_padding_are_not_cut_and_that_is_said(tmp_path, caplog):
    flattens = transformers.DataCollatorWithFlattening()
    with caplog.at_level(logging.WARNING, "hybridtrain"):
        assert_alike(tmp_path, llama, data_collator=flattens)
    assert "one device works at a time" in caplog.text


def test_a_batch_size_that_is_found_by_running_out_of_memory(tmp_path):
    def without_memory_for_five_rows(trainer):
        step = trainer.training_step

        def training_step(model, inputs, *more):
            if trainer.state.global_step and len(inputs["input_ids"]) == 5:
                raise RuntimeError("CUDA out of memory.")
            return step(model, inputs, *more)

        trainer.training_step = training_step

    assert_alike(
        tmp_path,
        llama,
        before=without_memory_for_five_rows,
        auto_find_batch_size=True,
        max_steps=2,
    )


@pytest.fixture
def flash_attention(monkeypatch):
    """Attention in the place of `flash_attention_2`; returns the modules that may call it.

    Its kernels run on GPUs, but copies of a model on the CPU.
    """
    modules = set()

    def attention(module, query, key, value, mask, scaling, **_):
        assert module in modules
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
        if mask is not None:  # of shape (samples, tokens)
            seen = seen & mask[:, None, None, :].bool() | torch.eye(len(seen), dtype=torch.bool)
        values = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling
        )
        return values.transpose(1, 2).contiguous(), None

    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._local_mapping, "flash_attention_2", attention)
    return modules


def test_kernels_of_attention_that_run_on_gpus_alone(flash_attention):
    gradients, batch = [], padded([Texts()[i] for i in range(6)])
    for wrap in (lambda model: model, piped):
        model = llama()
        model.config._attn_implementation = "flash_attention_2"
        flash_attention.update(layer.self_attn for layer in model.model.layers)
        wrap(model)(**batch).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    plain, pipe = gradients
    torch.testing.assert_close(pipe, plain, **CLOSE)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = run(tmp_path / "whole", llama(attention_dropout=0.3), piped)
    (first,) = sorted((tmp_path / "whole").glob("checkpoint-3"))
    _, weights = run(tmp_path / "again", llama(attention_dropout=0.3), piped, resume=str(first))
    torch.testing.assert_close(weights, whole[1], rtol=0, atol=0)


@pytest.mark.thorough
def test_a_resumed_run_may_change_from_plain_to_pipelined(tmp_path):
    whole = run(tmp_path / "whole", llama(), lambda model: model)
    (first,) = sorted((tmp_path / "whole").glob("checkpoint-3"))
    _, weights = run(tmp_path / "again", llama(), piped, resume=str(first))
    torch.testing.assert_close(weights, whole[1], **CLOSE)


def trainer_of(folder, **more):
    args = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], **more)
    args._n_gpu = 2  # as on a machine with two GPUs
    return transformers.Trainer(piped(llama()), args, train_dataset=Texts(), data_collator=padded)


def test_it_puts_no_data_parallel_around_a_pipeline(tmp_path):
    trainer = trainer_of(tmp_path)
    assert trainer._wrap_model(trainer.model) is trainer.model


def test_its_torch_compile_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="pass compile=True to pipelined"):
        trainer_of(tmp_path, torch_compile=True).train()


def test_generation_is_that_of_the_plain_model():
    plain, model = llama(), piped(llama())
    batch = padded([Texts()[i] for i in range(5)])
    model(**batch).loss.backward()  # the pipeline is made
    ids = torch.randint(1, 50, (3, 5), generator=torch.Generator().manual_seed(0))
    for options in ({}, {"num_beams": 3}, {"use_cache": False}):
        options = {"max_new_tokens": 6, "do_sample": False, **options}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_keys_and_values_come_back_from_a_model_in_evaluation():
    plain, model = llama().eval(), piped(llama()).eval()
    ids = torch.randint(1, 50, (3, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache, expected = (net(ids[:, :4]).past_key_values for net in (model, plain))
        after = [
            net(ids[:, 4:], past_key_values=c).logits
            for net, c in ((model, cache), (plain, expected))
        ]
    torch.testing.assert_close(after[0], after[1], **CLOSE)


def question_answering():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForQuestionAnswering(config)


def test_answers_that_the_loss_would_ignore_are_refused():
    """A mean over starts and a mean over ends, which have different counts then."""
    model = piped(question_answering())
    inputs = {"input_ids": torch.randint(50, (6, 8)), "end_positions": torch.full((6,), 5)}
    model(**inputs, start_positions=torch.arange(6)).loss.backward()
    with pytest.raises(BatchError, match="outside its sequence"):
        model(**inputs, start_positions=torch.tensor([1, 2, 8, 3, 8, 4]))


def test_gradients_of_answers_are_exact_but_for_those_that_are_zero():
    """A softmax over positions does not change if a constant is added to all scores, so the bias of
    the scores and that of the last norm have the gradient zero: theirs is rounding, for the plain
    model too, and relative differences of it mean nothing."""
    gradients = []
    for wrap in (lambda net: net, piped):
        torch.manual_seed(0)
        net = wrap(question_answering().double())
        inputs = {"input_ids": torch.randint(50, (6, 8)), "end_positions": torch.arange(6) + 2}
        for _ in range(2):
            net.zero_grad()
            net(**inputs, start_positions=torch.arange(6)).loss.backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    plain, pipe = gradients
    for name in ("qa_outputs.bias", "bert.encoder.layer.3.output.LayerNorm.bias"):
        assert plain[name].abs().max() < 1e-15
    torch.testing.assert_close(pipe, plain, rtol=1e-10, atol=1e-15)


def images_and_text():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    of_text = transformers.LlamaConfig(vocab_size=50, num_attention_heads=4, **sizes)
    of_images = transformers.CLIPVisionConfig(
        image_size=16, patch_size=8, num_attention_heads=4, **sizes
    )
    config = transformers.LlavaConfig(
        vision_config=of_images, text_config=of_text, image_token_index=49, image_seq_length=4
    )
    return transformers.LlavaForConditionalGeneration(config)


def without_images(net):
    before = net.forward

    def forward(**inputs):
        outputs = before(**inputs)
        kind = transformers.modeling_outputs.CausalLMOutput
        return kind(loss=outputs.loss, logits=outputs.logits)

    net.forward = forward
    return net


def test_a_model_of_images_and_text_without_its_output_for_each_image():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(49, (6, 10), generator=g)
    ids[:, :4] = 49
    images = torch.randn(6, 3, 16, 16, generator=g)
    inputs = {"input_ids": ids, "labels": ids, "pixel_values": images}
    if "image_outputs" in images_and_text()(**inputs):  # older transformers return none
        with pytest.raises(BatchError, match=r"image_outputs.*model\.forward = "):
            piped(images_and_text())(**inputs)
    plain, net = without_images(images_and_text()), without_images(images_and_text())
    net(**inputs)  # transformers sets hooks for hidden states, and a copy needs its own
    model = piped(net)
    for net in (plain, model):
        net(**inputs).loss.backward()
    gradients, expected = (
        {name: p.grad for name, p in net.named_parameters()} for net in (model, plain)
    )
    torch.testing.assert_close(gradients, expected, **CLOSE)


def test_a_second_loss_of_a_router_is_refused():
    net = causal_lm("Mixtral", num_hidden_layers=2, num_local_experts=4, output_router_logits=True)
    with pytest.raises(BatchError, match="a router"):
        piped(net)(**padded([Texts()[i] for i in range(6)]))
