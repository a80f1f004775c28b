"""What a user of the Hub has in a folder, made here: texts, a tokenizer and a small BERT."""

import json
import random
from pathlib import Path

import torch

GOOD, BAD = ("good", "fine", "nice"), ("bad", "poor", "ugly")
OTHERS = ("film", "story", "plot", "actor", "scene", "very", "quite", "really")


def write_reviews(path: Path, number: int) -> None:
    """Writes reviews, a JSON object each line, whose first word says which class they are of."""
    draws = random.Random(0)
    lines = []
    for _ in range(number):
        positive = draws.random() < 0.5
        first = draws.choice(GOOD if positive else BAD)
        text = " ".join([first, *draws.choices(OTHERS, k=draws.randint(2, 9))])
        label, summary = ("pos", "good film") if positive else ("neg", "bad film")
        lines.append(json.dumps({"text": text, "label": label, "summary": summary}) + "\n")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines))


def write_bert(folder: Path, layers: int = 2) -> None:
    """Writes a BERT with random weights and its tokenizer, as `save_pretrained` does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: i for i, word in enumerate([*special, *GOOD, *BAD, *OTHERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", words["[SEP]"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]",
        eos_token="[SEP]",
    )  # fmt: skip
    fast.model_input_names = ["input_ids", "attention_mask"]
    fast.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)


def write_t5(folder: Path, tokenizer: Path) -> None:
    """Writes a T5 with random weights, and the tokenizer of another folder."""
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    words = AutoTokenizer.from_pretrained(tokenizer)
    config = T5Config(
        vocab_size=len(words), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
        pad_token_id=0, eos_token_id=words.eos_token_id, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    words.save_pretrained(folder)


CHAT = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def write_llama(folder: Path, layers: int = 3, **changes: int) -> None:
    """Writes a Llama with random weights, and a tokenizer with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    config = LlamaConfig(
        **{"vocab_size": _write_chat_tokenizer(folder), **sizes, **changes},
        num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_gpt2(folder: Path) -> None:
    """Writes a GPT-2 with random weights, and a tokenizer with a chat template."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_write_chat_tokenizer(folder), n_embd=32, n_layer=2, n_head=2, n_positions=64,
        pad_token_id=0, bos_token_id=2, eos_token_id=3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(folder)


def _write_chat_tokenizer(folder: Path) -> int:
    """Writes a tokenizer with a chat template; returns the number of its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    words = {word: i for i, word in enumerate([*special, *GOOD, *BAD, *OTHERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
        eos_token="</s>", additional_special_tokens=special[4:],
    )  # fmt: skip
    fast.model_input_names = ["input_ids", "attention_mask"]
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return len(words)


def write_chats(path: Path, number: int) -> None:
    """Writes conversations of one to three turns, a JSON object with `messages` each line."""
    draws = random.Random(0)
    lines = []
    for _ in range(number):
        messages = []
        if draws.random() < 0.3:
            messages.append({"role": "system", "content": "very nice"})
        for _ in range(draws.randint(1, 3)):
            kind = draws.choice((GOOD, BAD))
            asked = " ".join([draws.choice(kind), *draws.choices(OTHERS, k=draws.randint(1, 4))])
            told = f"{draws.choice(kind)} {draws.choice(OTHERS)}"
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines))
