"""Hugging Face tokenizers, loaded from a file, a folder or a name on the Hub."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hybridtrain.data import digest_of_texts
from hybridtrain.errors import DataError, argument, setting

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
        raise DataError(
            f"{setting('tokenizer', name)}: no such file or folder ({path.absolute()}): set "
            f"{argument('tokenizer')} to its place"
        )
    try:
        if not path.is_file():
            loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            _check_files(loaded, name, path)
            return loaded
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except DataError:
        raise
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


def _check_files(tokenizer: Any, name: str, folder: Path) -> None:
    """Refuses a local folder without a tokenizer, for which transformers returns an empty one.

    Raises:
        DataError: names the files.
    """
    files = {*getattr(tokenizer, "vocab_files_names", {}).values()}
    if not files or not folder.is_dir():  # a tokenizer of bytes has no files; a name on the Hub
        return
    files |= {"tokenizer.json", "tokenizer_config.json"}
    has_vocabulary = any((folder / file).is_file() for file in files - {"tokenizer_config.json"})
    if not has_vocabulary:
        raise DataError(
            f"{setting('tokenizer', name)}: the folder has no tokenizer ({', '.join(sorted(files))}"
            f"): copy these files from where the model comes from, or set "
            f"{argument('tokenizer')} to another folder, a tokenizer.json or a name on the Hub"
        )


def unknown_tokens(tokenizer: Any, name: str, ids: Iterable[int]) -> list[str]:
    """Returns a note about the share of unknown tokens; none without such tokens.

    Args:
        tokenizer: a tokenizer of transformers.
        name: its name in messages.
        ids: the tokens of texts, without special tokens.

    Raises:
        DataError: all tokens are unknown.
    """
    tokens = np.fromiter(ids, dtype=np.int64)
    unknown = 0
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id != tokenizer.eos_token_id:
        unknown = int((tokens == tokenizer.unk_token_id).sum())
    if unknown and unknown == len(tokens):
        raise DataError(
            f"{setting('tokenizer', name)} knows none of the words of the texts: it is damaged or "
            f"for a different language; set {argument('tokenizer')} to the tokenizer of the model"
        )
    return [f"{unknown / len(tokens):.1%} of the tokens are unknown"] if unknown else []


def decoder_start_of(name: str) -> int | None:
    """Returns the first token of a decoder by a model's own files; None: they have none.

    Args:
        name: the folder or name of a model.
    """
    from transformers import AutoConfig

    if Path(name).is_file():
        return None
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError):  # the tokenizer is in a folder of its own
        return None
    start = getattr(config, "decoder_start_token_id", None)
    return None if start is None else int(start)


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
