"""A cluster job: its processes, nodes and GPUs, and the script that starts them.

`layout_of` derives the number and place of processes from a config; `batch_script`,
`torchrun_lines` and `kubernetes_manifest` write the text that starts them. The templates and their
results are meant to be read: a user who needs more can edit the script.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from hybridtrain._base.devices import check_nb_part
from hybridtrain._base.text_table import counted
from hybridtrain.cli.config.schema import AUTO, Config, SubmitConfig
from hybridtrain.errors import ConfigError, Interrupted, check_choice, naming
from hybridtrain.options import seconds

TARGETS = ("slurm", "torchrun", "kubernetes")
RUNTIMES = ("pyxis", "apptainer", "singularity", "charliecloud", "shifter", "podman-hpc")
# The runtime's argument that makes a vendor's GPUs visible to a process. Pyxis gets the GPUs from
# Slurm, and users prepare Charliecloud images once with ch-fromhost.
GPU_ARGUMENTS = {
    "apptainer": {"nvidia": "--nv", "amd": "--rocm"},
    "singularity": {"nvidia": "--nv", "amd": "--rocm"},
    "shifter": {"nvidia": "--module=gpu"},
    "podman-hpc": {"nvidia": "--gpu"},
}
GPU_VENDORS = ("nvidia", "amd", "none")


@dataclass(frozen=True)
class Container:
    """The container of a job's processes: the keys of `submit.container`.

    Attributes:
        image: in the runtime's format, a path or an address with a tag.
        runtime: one of `RUNTIMES`; None for Kubernetes, which has its own.
        gpus: the vendor of the GPUs, one of `GPU_VENDORS`; `none` adds no argument.
        mounts: folders to mount in addition to the working directory, in the runtime's syntax:
            `/data:/in`.
        args: more arguments of the runtime, verbatim.
    """

    image: str
    runtime: str | None = None
    gpus: str = "nvidia"
    mounts: tuple[str, ...] = ()
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobLayout:
    """The processes of a job.

    Attributes:
        nodes: the number of nodes.
        processes_per_node: the number of processes (Slurm tasks) per node.
        gpus_per_node: the number of GPUs per node, or 0.
        nb_part: the devices of a pipeline.
        processes_per_replica: the processes of one pipeline.
        time_s: the time limit in seconds; None: the cluster's default.
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
            f"{counted(self.nodes, 'node')} x {counted(self.processes_per_node, 'process', 'es')}",
            f"{counted(self.replicas, 'replica')} of {counted(self.nb_part, devices)}",
        ]
        return ", ".join(parts)


def layout_of(config: Config) -> JobLayout:
    """Returns the layout that the groups `submit`, `pipeline` and `world` describe.

    Raises:
        ConfigError: the numbers are inconsistent; the message names the keys.
    """
    submit, nb_part = config.submit, config.pipeline.nb_part
    if nb_part == AUTO:
        raise ConfigError(
            "pipeline.nb_part=auto cannot be used in a job, which needs the number of processes in "
            "advance: `hybridtrain plan hardware=...` suggests a value for pipeline.nb_part="
        )
    check_nb_part(nb_part)
    _check_values(submit)
    distributed = config.world.engine == "distributed"
    gpus, per_process = submit.gpus_per_node or 0, 1 if distributed else nb_part
    devices = config.world.devices
    listed = devices if isinstance(devices, list) else [devices]
    if not gpus and any(str(device).startswith("cuda") for device in listed):
        raise ConfigError(f"world.devices={devices} needs GPUs: set submit.gpus_per_node=")
    over_nodes = ", or set world.engine=distributed, for a pipeline over several nodes"
    hint = over_nodes if nb_part > gpus and not distributed else ""
    processes = submit.processes_per_node
    if processes is None:
        if gpus % per_process:
            raise ConfigError(
                f"submit.gpus_per_node={gpus} is not a multiple of pipeline.nb_part={nb_part}, the "
                f"GPUs of a process: change pipeline.nb_part=, or set "
                f"submit.processes_per_node={gpus // per_process or 1} and enough GPUs for it{hint}"
            )
        processes = gpus // per_process or (nb_part if distributed else 1)
    elif gpus and processes * per_process > gpus and not config.world.share_gpus:
        need = "1 GPU" if distributed else f"pipeline.nb_part={nb_part}"
        raise ConfigError(
            f"submit.processes_per_node={processes} x {need} need {processes * per_process} GPUs "
            f"per node, but submit.gpus_per_node={gpus}: change one of them{hint}"
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
            f"submit.nodes={submit.nodes} x {counted(processes, 'process', 'es')} = "
            f"{layout.processes}, which is not a multiple of pipeline.nb_part={nb_part}: change "
            f"submit.nodes=, submit.processes_per_node= or submit.gpus_per_node="
        )
    return layout


def container_of(submit: SubmitConfig) -> Container | None:
    """Returns the container of a job, if it has one.

    Raises:
        ConfigError: `submit.container` is not a mapping of the keys of a `Container`.
    """
    container = submit.container
    if container is None:
        return None
    names = [field.name for field in fields(Container)]
    if not isinstance(container, Mapping) or not container.get("image"):
        raise ConfigError(
            f"submit.container={container} must be null, or a mapping with an image: "
            f"submit.container={{image: my.sqsh, runtime: pyxis}}"
        )
    for key, value in container.items():
        check_choice("a key of submit.container", key, names)
        if isinstance(value, list) != (key in ("mounts", "args")):
            raise ConfigError(
                f"submit.container.{key}={value} must be a list"
                if key in ("mounts", "args")
                else f"submit.container.{key}={value} must be a string"
            )
    lists = {key: tuple(map(str, container[key])) for key in ("mounts", "args") if key in container}
    gpus = container.get("gpus", "nvidia")
    check_choice("submit.container.gpus", gpus, GPU_VENDORS)
    return Container(str(container["image"]), container.get("runtime"), gpus, **lists)


def cpus_of_a_process(submit: SubmitConfig, layout: JobLayout) -> int | None:
    """Returns the CPUs per process that the job requests; None: the cluster's default."""
    if submit.cpus_per_task is not None or submit.cpus_per_gpu is None:
        return submit.cpus_per_task
    return submit.cpus_per_gpu * layout.gpus_of_a_process or None


def slurm_time(seconds: int) -> str:
    """Returns a time in Slurm's format.

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
    of_nodes = ("nodes", "processes_per_node", "gpus_per_node", "array_parallelism")
    numbers = (*of_nodes, "cpus_per_task", "cpus_per_gpu")
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
        arguments = GPU_ARGUMENTS.get(str(container.runtime))
        if arguments is not None and container.gpus not in (*arguments, "none"):
            raise ConfigError(
                f"submit.container.gpus={container.gpus}: {container.runtime} has no argument for "
                f"these GPUs; set submit.container.gpus=none, and the arguments that your centre "
                f"documents in submit.container.args="
            )
    if submit.to == "torchrun" and container.runtime == "pyxis":
        raise ConfigError(
            "submit.container.runtime=pyxis needs Slurm: set submit.container.runtime=apptainer"
        )
    if submit.to == "kubernetes":
        for mount in container.mounts:
            if ":" not in mount:
                raise ConfigError(
                    f"submit.container.mounts={mount}: with Kubernetes, each mount is a persistent "
                    f"volume claim and its folder, as in my-claim:/data"
                )


def _full_time(time: object) -> object:
    """Expands Slurm's short forms: `10:00` is minutes:seconds, `1-12` days-hours."""
    if short := re.fullmatch(r"(\d+):(\d\d)", str(time).strip()):
        minutes, rest = map(int, short.groups())
        return slurm_time(60 * minutes + rest)
    if short := re.fullmatch(r"\d+-\d+(:\d\d)?", str(time).strip()):
        return f"{short[0]}:00" if short[1] else f"{short[0]}:00:00"
    return time


def _time_s(submit: SubmitConfig) -> int | None:
    with naming({"max_time": "submit.time"}):
        time_s = seconds(_full_time(submit.time))
    if time_s is None:
        return None
    if submit.to == "slurm" and time_s <= submit.signal_s:
        raise ConfigError(
            f"submit.time={submit.time} is {time_s:g} s, but Slurm signals the run "
            f"submit.signal_s={submit.signal_s} s before the limit: raise submit.time= (90m and "
            f"1:30:00 are 90 minutes), or lower submit.signal_s="
        )
    return round(time_s)


PORT = 29500
"""The port of the rendezvous without Slurm; torchrun's default."""


@dataclass(frozen=True)
class JobRun:
    """The run, or the runs, that a job trains.

    Attributes:
        name: the name of the run or sweep.
        folder: its folder; the script and the job's output are in its subfolder `slurm`.
        overrides: the command line; for a sweep, the overrides that all runs share.
        config_dir: a folder with more groups and options.
        array: for a sweep, the lines of its file to train, starting from 1.
        sweep_file: for a sweep, a file with one line of overrides per run.

    Raises:
        ConfigError: the name has a line break, and would end a comment.
    """

    name: str
    folder: Path
    overrides: list[str]
    config_dir: str | None = None
    array: Sequence[int] = ()
    sweep_file: Path | None = None

    def __post_init__(self) -> None:
        if len(self.name.splitlines()) > 1:
            raise ConfigError(f"run_name={self.name!r} has a line break: set another one")


SLURM = """\
#!/bin/bash
# {name}: {layout}. Written by `hybridtrain submit`.
{directives}

{setup}
{overrides}
rc=0
{command} || rc=$?

# Exit code {stopped}: the run has saved after a request to stop. Requeue it if its job is running,
# but not if the job was cancelled. SLURM_JOB_ID may be the id of a whole array.
id=$SLURM_JOB_ID
if [ -n "${{SLURM_ARRAY_JOB_ID:-}}" ]; then id=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID; fi
if [ $rc = {stopped} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_requeues} ] &&
    scontrol show job "$id" | grep -q JobState=RUNNING; then
    scontrol requeue "$id" && sleep 600 # Slurm ends this script
fi
exit $rc
"""

KUBERNETES = """\
# {run}: {layout}. Written by `hybridtrain submit`, for kubectl apply -f -.
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None # headless: pods have names, and rank 0 is {name}-0.{name}
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: {backoff} # pods that may fail; the run resumes from its newest checkpoint
{deadline}\
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {grace} # to save when a pod is evicted
      containers:
        - name: train
          image: {image}
          command:
{command}
          resources:
            limits: {limits}
          volumeMounts:
{mounts}
      volumes:
{volumes}
"""


def batch_script(run: JobRun, submit: SubmitConfig, layout: JobLayout) -> str:
    """Returns the script for `sbatch`.

    Raises:
        ConfigError: a value has a line break.
    """
    # the only name that exists in every image
    python = "python3" if submit.container is not None else Path(sys.executable).name
    words = ["srun --kill-on-bad-exit=1"]
    cpus = cpus_of_a_process(submit, layout)
    if cpus is not None:  # srun does not inherit it from sbatch
        words.append(f"--cpus-per-task={cpus}")
    words += [*submit.srun_args, *_container(container_of(submit), layout)]
    train = f'{python} -m hybridtrain train{_config_dir(run)} "${{overrides[@]}}"'
    return SLURM.format(
        name=run.name,
        layout=layout,
        directives="\n".join(_directives(run, submit, layout)),
        setup=_setup(submit),
        overrides=_overrides(run),
        command=" ".join(words) + f" \\\n    {train}",
        stopped=Interrupted.exit_code,
        max_requeues=submit.max_requeues,
    )


def torchrun_lines(run: JobRun, submit: SubmitConfig, layout: JobLayout) -> str:
    """Returns the commands to run on each node."""
    words = [*_container(container_of(submit), layout), "torchrun"]
    if layout.nodes == 1:
        words.append("--standalone")
        where = "On the node"
    else:
        words += [f"--nnodes {layout.nodes}", f"--rdzv-id {shlex.quote(run.name)}"]
        words += ["--rdzv-backend c10d", f'--rdzv-endpoint "$FIRST_NODE:{PORT}"']
        where = f"On each of the {layout.nodes} nodes, with FIRST_NODE set to the name of one node"
    words.append(f"--nproc-per-node {layout.processes_per_node}")
    overrides = " ".join(map(shlex.quote, run.overrides))
    lines = [f"# {run.name}: {layout}", f"# {where}:", f"cd {shlex.quote(str(Path.cwd()))}"]
    lines += _before_run(submit)
    lines.append(f"{' '.join(words)} \\")
    lines.append(f"    -m hybridtrain train{_config_dir(run)} {overrides}")
    return "\n".join(lines) + "\n"


def kubernetes_manifest(run: JobRun, submit: SubmitConfig, layout: JobLayout) -> str:
    """Returns a headless service and an indexed job with one pod for each node."""
    container = container_of(submit)
    assert container is not None  # `layout_of` checked it
    name = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:50].strip("-") or "run"
    name = name if name[0].isalpha() else f"run-{name}"
    words = ["torchrun", f"--nnodes={layout.nodes}"]
    words += [
        f"--nproc-per-node={layout.processes_per_node}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
    ]
    words += [f"--master-addr={name}-0.{name}", f"--master-port={PORT}", "-m", "hybridtrain"]
    command = ["train", *([] if run.config_dir is None else ["--config-dir", run.config_dir])]
    # Kubernetes replaces $(NAME), and $$ by $
    words += [word.replace("$", "$$") for word in (*command, *run.overrides)]
    if before := _before_run(submit):
        script = "\n".join([*before, 'exec "$@"']).replace("$", "$$")
        words = ["bash", "-c", script, "bash", *words]
    limits: dict[str, object] = {}
    if layout.gpus_per_node:
        limits["nvidia.com/gpu"] = layout.gpus_per_node
    cpus = cpus_of_a_process(submit, layout)
    if cpus is not None:
        limits["cpu"] = cpus * layout.processes_per_node
    if submit.mem is not None:
        limits["memory"] = f"{submit.mem}Mi" if isinstance(submit.mem, int) else str(submit.mem)
    mounts, volumes = (
        ["{name: shm, mountPath: /dev/shm}"],
        ["{name: shm, emptyDir: {medium: Memory}}"],
    )
    for number, mount in enumerate(container.mounts):
        claim, _, folder = mount.partition(":")
        mounts.append(f"{{name: mount-{number}, mountPath: {_yaml(folder)}}}")
        claimed = f"persistentVolumeClaim: {{claimName: {_yaml(claim)}}}"
        volumes.append(f"{{name: mount-{number}, {claimed}}}")
    deadline = "" if layout.time_s is None else f"  activeDeadlineSeconds: {layout.time_s}\n"
    return KUBERNETES.format(
        run=run.name,
        layout=layout,
        name=name,
        nodes=layout.nodes,
        backoff=submit.max_requeues * layout.nodes,
        deadline=deadline,
        grace=submit.signal_s,
        image=_yaml(container.image),
        command="\n".join(f"            - {_yaml(word)}" for word in words),
        limits=json.dumps(limits),
        mounts="\n".join(f"            - {mount}" for mount in mounts),
        volumes="\n".join(f"        - {volume}" for volume in volumes),
    )


def _yaml(text: str) -> str:
    """Returns a string as a one-line YAML scalar; JSON differs beyond 16 bits."""
    quoted: str = yaml.safe_dump(text, default_style='"', width=float("inf"))
    return quoted.rstrip("\n")


def _directives(run: JobRun, submit: SubmitConfig, layout: JobLayout) -> Iterator[str]:
    """Yields the #SBATCH lines; a folder may contain spaces and `%`, which Slurm expands."""
    log = str(run.folder / "slurm").replace("%", "%%") + ("/%A_%a.out" if run.array else "/%j.out")
    parallel = "" if submit.array_parallelism is None else f"%{submit.array_parallelism}"
    values = {
        "job-name": run.name,
        "array": f"{_ranges(run.array)}{parallel}" if run.array else None,
        "nodes": layout.nodes,
        "ntasks-per-node": layout.processes_per_node,
        "gres": f"gpu:{layout.gpus_per_node}" if layout.gpus_per_node else None,
        "cpus-per-task": cpus_of_a_process(submit, layout),
        "mem": submit.mem,
        "partition": submit.partition,
        "account": submit.account,
        "qos": submit.qos,
        "constraint": submit.constraint,
        "time": None if layout.time_s is None else slurm_time(layout.time_s),
        # sent to the processes, not to this script
        "signal": f"USR1@{submit.signal_s}" if submit.signal_s else None,
        "chdir": Path.cwd(),
        "output": log,
        "open-mode": "append",
    }
    for option, value in values.items():
        if value is not None:
            if "\n" in str(value):
                raise ConfigError(f"{option}={value!r} has a line break, which sbatch rejects")
            yield f"#SBATCH --{option}={shlex.quote(str(value))}"
    yield "#SBATCH --requeue"
    yield from (f"#SBATCH {argument}" for argument in submit.sbatch_args)


def _ranges(numbers: Sequence[int]) -> str:
    """Returns sorted numbers in Slurm's format.

    >>> _ranges([1, 2, 3, 7, 9, 10])
    '1-3,7,9-10'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, part)) for part in ranges)


def _before_run(submit: SubmitConfig) -> list[str]:
    """Returns the user's shell lines, which run before the command."""
    load = ["module load " + " ".join(map(shlex.quote, submit.modules))] if submit.modules else []
    return [*load, *submit.setup]


def _setup(submit: SubmitConfig) -> str:
    lines = _before_run(submit)
    if (
        submit.container is None
    ):  # the Python that submitted the job, unless these lines select another
        lines.insert(0, f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")
    return "".join(f"{line}\n" for line in lines)


def _overrides(run: JobRun) -> str:
    if run.sweep_file is not None:
        file = shlex.quote(str(run.sweep_file))
        line = f'line=$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {file})'
        # without its overrides, a run would train with the wrong settings
        missing = f'echo "error: no line $SLURM_ARRAY_TASK_ID in" {file} >&2'
        check = f'if [ -z "$line" ]; then {missing}; exit 2; fi'
        of_all = " ".join(map(shlex.quote, run.overrides))
        return f'{line}\n{check}\noverrides=({of_all})\neval "overrides+=($line)"'
    return "\n".join(["overrides=(", *(f"    {shlex.quote(o)}" for o in run.overrides), ")"])


def _container(container: Container | None, layout: JobLayout) -> Sequence[str]:
    """Returns the words before the command that run it in the image, in this directory."""
    if container is None:
        return []
    here = str(Path.cwd())
    mounts = [here, *container.mounts]
    image, here = shlex.quote(container.image), shlex.quote(here)
    if container.runtime == "pyxis":
        pairs = ",".join(m if ":" in m else f"{m}:{m}" for m in mounts)
        options = [f"--container-image={image}", f"--container-mounts={shlex.quote(pairs)}"]
        return [*options, f"--container-workdir={here}", *container.args]
    gpus = GPU_ARGUMENTS.get(str(container.runtime), {}).get(container.gpus)
    shown = [gpus] if gpus and layout.gpus_per_node else []
    if container.runtime == "shifter":  # mounts the user's folders automatically
        volumes = [f"--volume={shlex.quote(mount)}" for mount in container.mounts]
        where = [f"--image={image}", f"--workdir={here}"]
        return ["shifter", *shown, *where, *volumes, *container.args]
    if container.runtime == "podman-hpc":
        volumes = [f"--volume {shlex.quote(m if ':' in m else f'{m}:{m}')}" for m in mounts]
        # variables set by srun and by the user's setup lines
        passed = [f"--env '{names}'" for names in ("SLURM_*", "NCCL_*", "HYBRIDTRAIN_*")]
        options = ["--rm", "--net host", *shown, f"--workdir {here}", *volumes, *passed]
        return ["podman-hpc run", *options, *container.args, image]
    binds = [f"--bind {shlex.quote(mount)}" for mount in mounts]
    if container.runtime in ("apptainer", "singularity"):
        options = [*shown, f"--pwd {here}", *binds, *container.args]
        return [f"{container.runtime} exec", *options, image]
    return ["ch-run", f"--cd {here}", *binds, *container.args, image, "--"]


def _config_dir(run: JobRun) -> str:
    return "" if run.config_dir is None else f" --config-dir {shlex.quote(run.config_dir)}"
