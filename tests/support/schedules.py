"""The schedules that come with the package, without those that a test registers."""

from hybridtrain.schedule import registered, schedule_names

BUILT_IN = tuple(
    name for name in schedule_names() if registered(name).builder.__module__[:12] == "hybridtrain."
)
