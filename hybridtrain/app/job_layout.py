"""The layout of a job: how many processes on how many nodes, and which GPUs each has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from hybridtrain.app.config import AUTO, Config, SubmitConfig
from hybridtrain.app.keys import errors_with_config_keys
from hybridtrain.devices import check_nb_part
from hybridtrain.errors import ConfigError, check_choice
from hybridtrain.trainer_options import seconds

TARGETS = ("slurm", "torchrun", "kubernetes")
RUNTIMES = ("pyxis", "apptainer", "charliecloud")


@dataclass(frozen=True)
class Container:
    """The image that the processes of a job run in: the keys of `submit.container`.

    Attributes:
        image: as the runtime names it, a path or an address with a tag.
        runtime: `pyxis`, `apptainer` or `charliecloud`; None for Kubernetes, which has its own.
        mounts: folders beside the working directory, as the runtime takes them: `/data:/in`.
        args: more arguments of the runtime, verbatim.
    """

    image: str
    runtime: str | None = None
    mounts: tuple[str, ...] = ()
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobLayout:
    """The processes of a job.

    Attributes:
        nodes: of the job.
        processes_per_node: of each node, as Slurm's tasks.
        gpus_per_node: 0: none.
        nb_part: the devices of a pipeline.
        processes_per_replica: of one pipeline.
        time_s: the time limit in seconds; None: as the cluster has it.
    """

    nodes: int
    processes_per_node: int
    gpus_per_node: int
    nb_part: int
    processes_per_replica: int
    time_s: int | None

    @property
    def processes(self) -> int:
        """The number of processes of the job."""
        return self.nodes * self.processes_per_node

    @property
    def replicas(self) -> int:
        """The number of copies of the model."""
        return self.processes // self.processes_per_replica

    @property
    def gpus_of_a_process(self) -> int:
        """The number of GPUs that one process uses."""
        return self.nb_part // self.processes_per_replica if self.gpus_per_node else 0

    def __str__(self) -> str:
        devices = "GPU" if self.gpus_per_node else "device"
        parts = [
            f"{_count(self.nodes, 'node')} x {_count(self.processes_per_node, 'process', 'es')}",
            f"{_count(self.replicas, 'replica')} of {_count(self.nb_part, devices)}",
        ]
        return ", ".join(parts)


def layout_of(config: Config) -> JobLayout:
    """Returns the layout that the groups `submit`, `pipeline` and `world` ask for.

    Raises:
        ConfigError: the numbers do not fit together; the message names the keys.
    """
    submit, nb_part = config.submit, config.pipeline.nb_part
    if nb_part == AUTO:
        raise ConfigError(
            "pipeline.nb_part=auto is chosen by the processes of a run, and a job has to say how "
            "many these are: `hybridtrain plan cluster=...` finds a number for pipeline.nb_part="
        )
    check_nb_part(nb_part)
    _check_values(submit)
    distributed = config.world.engine == "distributed"
    gpus, per_process = submit.gpus_per_node or 0, 1 if distributed else nb_part
    if not gpus and _names_gpus(config.world.devices):
        raise ConfigError(
            f"world.devices={config.world.devices} needs GPUs: set submit.gpus_per_node="
        )
    processes = submit.processes_per_node
    if processes is None:
        if gpus % per_process:
            raise ConfigError(
                f"submit.gpus_per_node={gpus} cannot be shared by processes of "
                f"pipeline.nb_part={nb_part} GPUs each: set another pipeline.nb_part, or "
                f"submit.processes_per_node={gpus // per_process or 1} with GPUs for it"
            )
        processes = gpus // per_process or (nb_part if distributed else 1)
    elif gpus and processes * per_process > gpus:
        each = "1 GPU" if distributed else f"pipeline.nb_part={nb_part}"
        raise ConfigError(
            f"submit.processes_per_node={processes} x {each} need {processes * per_process} GPUs "
            f"on a node, and submit.gpus_per_node={gpus}: set one of them to fit"
        )
    layout = JobLayout(
        nodes=submit.nodes,
        processes_per_node=processes,
        gpus_per_node=gpus,
        nb_part=nb_part,
        processes_per_replica=nb_part if distributed else 1,
        time_s=_time_s(submit),
    )
    if layout.processes % layout.processes_per_replica:
        raise ConfigError(
            f"submit.nodes={submit.nodes} x {_count(processes, 'process', 'es')} are "
            f"{layout.processes}, which cannot be shared by pipelines of "
            f"pipeline.nb_part={nb_part} processes: set submit.nodes, "
            f"submit.processes_per_node or submit.gpus_per_node for a multiple of {nb_part}"
        )
    return layout


def container_of(submit: SubmitConfig) -> Container | None:
    """Returns the container of a job, if it has one.

    Raises:
        ConfigError: `submit.container` is not a mapping of the keys of a `Container`.
    """
    given = submit.container
    if given is None:
        return None
    known = [field.name for field in fields(Container)]
    if not isinstance(given, Mapping) or not given.get("image"):
        raise ConfigError(
            f"submit.container={given} must be null, or a mapping with an image: "
            f"submit.container={{image: my.sqsh, runtime: pyxis}}"
        )
    for key, value in given.items():
        check_choice("a key of submit.container", key, known)
        if isinstance(value, list) != (key in ("mounts", "args")):
            raise ConfigError(
                f"submit.container.{key}={value} must be a list"
                if key in ("mounts", "args")
                else f"submit.container.{key}={value} must be a text"
            )
    lists = {key: tuple(map(str, given[key])) for key in ("mounts", "args") if key in given}
    return Container(str(given["image"]), given.get("runtime"), **lists)


def slurm_time(seconds: int) -> str:
    """Returns a time as Slurm writes it.

    >>> slurm_time(4 * 3600), slurm_time(36 * 3600 + 90)
    ('4:00:00', '1-12:01:30')
    """
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (
        f"{days}-{hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"
    )


def _check_values(submit: SubmitConfig) -> None:
    check_choice("submit.to", submit.to, TARGETS)
    least = {"signal_s": 0, "max_requeues": 0}
    numbers = ("nodes", "processes_per_node", "gpus_per_node", "cpus_per_task", "array_parallelism")
    for name, minimum in (least | dict.fromkeys(numbers, 1)).items():
        value = getattr(submit, name)
        if value is not None and value < minimum:
            raise ConfigError(f"submit.{name}={value} must be at least {minimum}")
    container = container_of(submit)
    if submit.to == "kubernetes" and container is None:
        raise ConfigError(
            "submit.to=kubernetes needs an image: set submit.container={image: registry/name:tag}"
        )
    if container is None:
        return
    if submit.to != "kubernetes":
        check_choice("submit.container.runtime", container.runtime, RUNTIMES)
    if submit.to == "torchrun" and container.runtime == "pyxis":
        raise ConfigError("submit.container.runtime=pyxis is a part of Slurm: use apptainer")
    if submit.to == "kubernetes":
        for mount in container.mounts:
            if ":" not in mount:
                raise ConfigError(
                    f"submit.container.mounts={mount}: for Kubernetes each is the name of a "
                    f"persistent volume claim and its folder, as in my-claim:/data"
                )


def _time_s(submit: SubmitConfig) -> int | None:
    with errors_with_config_keys({"max_time": "submit.time"}):
        time_s = seconds(submit.time)
    if time_s is None:
        return None
    if submit.to == "slurm" and time_s <= submit.signal_s:
        raise ConfigError(
            f"submit.time={submit.time} is {time_s:g} s, and the run is asked to save "
            f"submit.signal_s={submit.signal_s} s before its end: raise submit.time (90m and "
            f"1:30:00 are 90 minutes), or lower submit.signal_s"
        )
    return round(time_s)


def _names_gpus(devices: object) -> bool:
    listed = devices if isinstance(devices, list) else [devices]
    return any(str(device).startswith("cuda") for device in listed)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
