"""A real Slurm of a few nodes on this machine, for tests; see slurm.sh."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.launch import environment

SCRIPT = Path(__file__).with_name("slurm.sh")
PROGRAMS = ("slurmctld", "slurmd", "srun", "ip", "nsenter", "unshare", "setpriv")
_START_S = 60.0


class NoClusterError(Exception):
    """The cluster cannot be started on this machine."""


def what_is_missing() -> str | None:
    """What keeps this machine from running the cluster, in words; None: nothing."""
    if sys.platform != "linux":
        return "Linux is needed, for its namespaces"
    if os.geteuid() != 0:
        return "root is needed, for namespaces and a network of their own"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurm-wlm iproute2"
    return None


class Slurm:
    """The cluster while it is up.

    Attributes:
        folder: of its files; `private` in it is another disk on each node.
        work: the working directory of all commands.
    """

    def __init__(self, folder: Path, nodes: int = 3, spare: int = 0) -> None:
        """Starts it.

        Args:
            folder: of its files.
            nodes: `n1`, `n2`, ..., of Slurm.
            spare: nodes after these, which have a network alone.

        Raises:
            NoClusterError: the system does not allow it.
        """
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        errors = folder / "hold.log"
        with errors.open("w") as said:
            # its standard input ends with this process, however that ends, and the cluster with it
            self._holder = subprocess.Popen(
                [str(SCRIPT), "hold", str(folder), str(nodes), str(spare)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                start_new_session=True,
            )
        assert self._holder.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._holder.stdout, selectors.EVENT_READ)
            ready = selector.select(_START_S) and self._holder.stdout.readline() == "ready\n"
        if not ready:
            os.killpg(self._holder.pid, signal.SIGKILL)
            self._holder.wait(30)
            logs = [errors, *sorted((folder / "log").glob("*.log"))]
            lines = [line for log in logs if log.exists() for line in _last_lines(log)]
            raise NoClusterError(f"Slurm does not start here: {' | '.join(lines) or 'it hangs'}")
        self.init = int((folder / "init.pid").read_text())

    def down(self) -> None:
        """Ends the cluster and all that runs on it."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._holder.pid, signal.SIGKILL)
            self._holder.wait(30)

    def popen(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        output: str | None = None,
        node: str | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a command beside the controller, or beside Slurm on a `node`.

        `output` is a file in `work` for what it says.
        """
        inside = ["nsenter", "-t", str(self.init), "-m", "-u", "-i", "-n", "-p"]
        if node is not None:  # its number is one of the controller's namespace
            pid = (self.folder / f"{node}.pid").read_text().strip()
            inside += ["--", "nsenter", "-t", pid, "-m", "-u", "-i", "-n", "-p"]
            inside += ["-T"] * self.has_clocks
        out = open(self.work / output, "w") if output else subprocess.PIPE  # noqa: SIM115
        try:
            return subprocess.Popen(
                [*inside, f"--wdns={self.work}", "--", *command],
                env={**environment(env), "SLURM_CONF": str(self.folder / "slurm.conf")},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        finally:
            if output:
                out.close()  # type: ignore[union-attr]

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        timeout: float = 250,
        code: int | None = 0,
    ) -> str:
        """Runs a command beside the controller; returns what it printed.

        Fails, showing that, if the exit code is not `code` (None: any).
        """
        process = self.popen(*command, env=env)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{' '.join(command)} hangs\n{output}", pytrace=False)
        if code is not None and process.returncode != code:
            pytest.fail(f"{' '.join(command)}: {process.returncode}\n{output}", pytrace=False)
        return output

    def submit(self, script: str, *args: str) -> str:
        """Submits a batch script; returns the id of the job."""
        with tempfile.NamedTemporaryFile("w", suffix=".sh", dir=self.work, delete=False) as file:
            file.write(script)
        return self.run("sbatch", "--parsable", *args, file.name).strip()

    def state(self, job: str) -> str:
        """Returns the state of a job, as Slurm calls it."""
        shown = self.run("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    @property
    def has_clocks(self) -> bool:
        """Whether each node has a monotonic clock of its own."""
        return "clocks" in (self.folder / "log" / "init.log").read_text()

    def wait_for(self, file: str, text: str, seconds: float = 200) -> str:
        """Returns the content of a file in `work` once it has `text`; fails after so long."""
        path = self.work / file
        deadline = time.monotonic() + seconds
        content = ""
        while time.monotonic() < deadline and self._holder.poll() is None:
            content = path.read_text() if path.exists() else ""
            if text in content:
                return content
            time.sleep(0.2)
        pytest.fail(f"{file} does not come to have {text!r}:\n{content}", pytrace=False)

    def cut(self, node: str) -> None:
        """Pulls the network cable of a node."""
        self.run("ip", "link", "set", f"to-{node}", "down")

    def mend(self, node: str) -> None:
        """Plugs the network cable of a node in again."""
        self.run("ip", "link", "set", f"to-{node}", "up")

    def wait_until_gone(self, job: str, seconds: float = 200) -> None:
        """Returns when a job has ended; fails after so long."""
        deadline = time.monotonic() + seconds
        while self.run("squeue", "-h", "-j", job, code=None).strip():
            if time.monotonic() > deadline or self._holder.poll() is not None:
                pytest.fail(f"job {job} does not end", pytrace=False)
            time.sleep(0.5)


def _last_lines(path: Path) -> list[str]:
    """Returns the end of a log, without what does not say why."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if line and not line.startswith("==>")][-2:]
