"""What can be wrong with what a user asked for.

Each room of the library raises its own type, at the place where the fact is known. The message
says what is wrong, which key, layer or file it concerns, and what to do about it. The command
line prints such a message as it is, without a traceback; every other exception is a bug of this
project or of the user's code and keeps its traceback.
"""


class UserError(Exception):
    """A mistake in what was asked for, told in one message that names the way out."""


class ConfigError(UserError):
    """A config key, an override or a recipe is wrong."""


class WorldError(UserError):
    """The processes, devices or backend asked for are not there."""


class SplitError(UserError):
    """The model cannot be cut into the stages asked for."""


class ScheduleError(UserError):
    """A schedule is unknown, or breaks a rule that every schedule must keep."""


class BatchError(UserError):
    """A batch cannot be split into micro-batches, or its parts do not fit together."""


class DataError(UserError):
    """A data set is missing, damaged or not in the expected format."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit the model."""
