"""Names that a config gives: of metrics, callbacks, trackers, parameter groups and runs."""

from __future__ import annotations

import re

from hybridtrain.errors import ConfigError

_OTHER = r"[^\w .,:+=@()/-]"


def check_name(key: str, name: object, what: str, *, folder: bool = False) -> None:
    """Checks that a name is plain: it becomes a tag, a column, a folder.

    Args:
        key: the key with the name, for messages.
        name: the name.
        what: what it names.
        folder: it becomes the name of a folder, so it has no slash.

    Raises:
        ConfigError: it has a character that is neither a letter nor a digit nor in `_-.,:+=@()/`
            or a space, or it begins with another character than a letter, a digit or `_`.
    """
    text = str(name)
    wrong = re.search(_OTHER + (r"|/" if folder else ""), text)
    if wrong is None and re.match(r"\w", text) and ".." not in text.split("/"):
        return
    has = f"has the character {wrong[0]!r}" if wrong else "does not begin with a letter or digit"
    signs = "_-.,:+=@()" if folder else "_-.,:+=@()/"
    raise ConfigError(
        f"{key}: the name {text[:60]!r} of a {what} {has}: use letters, digits, spaces and {signs}"
    )


def plain(name: str) -> str:
    """Returns a generated name with `_` for the characters that a name cannot have."""
    return re.sub(_OTHER, "_", name)
