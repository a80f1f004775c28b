"""Hugging Face tokenizers, loaded from a file, a folder or a name on the Hub."""

from pathlib import Path
from typing import Any

from hybridtrain.data import digest_of_texts
from hybridtrain.errors import DataError, setting

# The usual names of special tokens; a bare tokenizer.json does not assign their roles.
_USUAL = {
    "pad_token": ("<pad>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
    "mask_token": ("<mask>", "[MASK]"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>"),
    "eos_token": ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>"),
}


def load_tokenizer(name: str) -> Any:
    """Returns a tokenizer of transformers, from a file, a folder or a name.

    Args:
        name: a file of the library `tokenizers` (`./tokenizer.json`), with special tokens
            recognized by their usual names; a folder written by `save_pretrained`; or a name on the
            Hugging Face Hub, which is looked up in its cache first.

    Raises:
        DataError: the tokenizer does not exist or is damaged, or transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise DataError(
            f"{setting('tokenizer', name)} needs transformers ({error}): "
            'pip install "hybridtrain[transformers]"'
        ) from error
    path = Path(name)
    local = path.exists()
    if not local and (path.suffix == ".json" or name.startswith((".", "/", "~"))):
        raise DataError(f"{setting('tokenizer', name)}: no such file or folder ({path.absolute()})")
    try:
        if not path.is_file():
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the library that parses a file raises plain Exceptions
        missing = "does not exist locally and cannot be loaded from the Hub"
        problem = "cannot be read" if local else missing
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{setting('tokenizer', name)} {problem} ({type(error).__name__}: {reason}). Use a "
            f"tokenizer.json, a folder written by save_pretrained, or the name of a model on the "
            f"Hugging Face Hub"
        ) from error
    vocabulary = tokenizer.get_vocab()
    for role, names in _USUAL.items():
        if token := next((candidate for candidate in names if candidate in vocabulary), None):
            tokenizer.add_special_tokens({role: token})
    # models differ in whether they accept the others, such as token_type_ids
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def vocabulary_digest(tokenizer: Any) -> str:
    """Returns the number of tokens, and a digest of the tokens and their ids."""
    tokens = tokenizer.get_vocab()
    digest = digest_of_texts(f"{token} {tokens[token]}" for token in sorted(tokens))
    return f"{len(tokens):,} tokens with digest {digest}"


def end_of_text(tokenizer: Any) -> list[int]:
    """Returns the token that ends a text, as a list; empty if the tokenizer has none."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return [int(token)]
    return []


def padding_token(tokenizer: Any) -> int | None:
    """Returns the id for padding: a token that no text contains; None: the tokenizer has none."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    return next((int(token) for token in ids if token is not None), None)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the tokenizer's special tokens under the names of a transformers configuration."""
    roles = ("bos", "eos", "pad", "sep")
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id", None) for role in roles}
    return {name: int(token) for name, token in ids.items() if token is not None}
