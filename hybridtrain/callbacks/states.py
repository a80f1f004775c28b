"""The states of a trainer's callbacks, as one entry of a checkpoint."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridtrain.callbacks.base import Callback
from hybridtrain.errors import ConfigError

if TYPE_CHECKING:
    from hybridtrain.trainer import Trainer

_log = logging.getLogger(__name__)


class CallbackStates:
    """The states of `callbacks` by their names, for `Trainer.states`.

    Attributes:
        optional: True, so that a checkpoint may lack them; see `Callback`.

    Raises:
        ConfigError: two callbacks that have a state have the same name.
    """

    optional = True

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._callbacks = [callback for callback in callbacks if _has_state(callback)]
        for name, count in Counter(callback.state_name for callback in self._callbacks).items():
            if count > 1:
                raise ConfigError(
                    f"callbacks= has {count} whose state is called {name!r}: give each its own "
                    f"`state_name`, in a subclass"
                )

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states by name; every process calls it."""
        return {callback.state_name: callback.state_dict() for callback in self._callbacks}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads a `state_dict`; a callback that it lacks begins anew, with a warning."""
        state = dict(state or {})
        main = self._trainer.world.is_main
        for callback in self._callbacks:
            if callback.state_name in state:
                callback.load_state_dict(state.pop(callback.state_name))
                continue
            callback.on_init(self._trainer)
            if main:
                _log.warning(
                    "the checkpoint has no state of the callback %s: it begins anew, at step %d",
                    callback.state_name, self._trainer.step,
                )  # fmt: skip
        if state and main:
            _log.warning(
                "the checkpoint has states of callbacks that this run does not have: %s",
                ", ".join(state),
            )


def _has_state(callback: Callback) -> bool:
    # one that is main_only has none, since other processes do not have it: see Callback
    return not callback.main_only and type(callback).state_dict is not Callback.state_dict
