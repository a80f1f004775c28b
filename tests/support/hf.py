"""Small models of transformers and small data, for trainers that take them."""

import torch
from torch.utils.data import Dataset

VOCABULARY = 50


class Texts(Dataset):
    """Texts of different lengths; with `classes`, each has a label."""

    def __init__(self, rows=24, seed=0, classes=None):
        g = torch.Generator().manual_seed(seed)
        self._rows = []
        for _ in range(rows):
            length = int(torch.randint(4, 13, (), generator=g))
            row = {"input_ids": torch.randint(1, VOCABULARY, (length,), generator=g)}
            if classes:
                row["labels"] = torch.randint(classes, (), generator=g)
            self._rows.append(row)

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]


def padded(rows):
    """A batch; texts without labels are their own, from the third token on."""
    texts = [row["input_ids"] for row in rows]
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for number, text in enumerate(texts):
        ids[number, : len(text)], mask[number, : len(text)] = text, 1
        labels[number, 2 : len(text)] = text[2:]
    if "labels" in rows[0]:
        labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def causal_lm(name, **settings):
    """A causal language model with grouped queries: `Llama`, `Mixtral` or `Gemma2`."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes | settings)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def llama(**settings):
    """A causal language model of four layers."""
    return causal_lm("Llama", **settings)


def gpt2(**settings):
    """A causal language model of two layers, whose linear layers are `Conv1D`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False,
        bos_token_id=1, eos_token_id=2, loss_type="ForCausalLM", **dropout, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def bert():
    """A classifier of three classes, which accepts `num_items_in_batch` and ignores it."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )


def t5():
    """An encoder and a decoder of two layers each."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def on_devices(model, device_map):
    """Does what accelerate does for a `device_map`, with devices such as `cpu:1`."""
    from accelerate import hooks

    for name in device_map:
        hook = hooks.AlignDevicesHook(execution_device="cpu")  # tensors of `cpu:1` say `cpu`
        hooks.add_hook_to_module(model.get_submodule(name), hook)
    model.hf_device_map = dict(device_map)
    return model
