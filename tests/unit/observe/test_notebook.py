"""Runs that are started from a notebook: a real kernel, its cells, and what they show."""

import os
import re
import signal
import threading

import nbformat
import pytest
from nbclient import NotebookClient
from support.launch import environment

from hybridtrain.errors import ConfigError, ProcessFailedError
from hybridtrain.launch import notebook, notebook_launcher

FIRST = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from hybridtrain import notebook_launcher

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

generator = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
)
# threads in this kernel, after which a fork would be unsafe
torch.set_num_threads(2)
(torch.randn(300, 300) @ torch.randn(300, 300)).sum()
"""
SESSION = """
def by_session(steps):
    from hybridtrain import Session
    with Session() as session:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        losses = []
        for inputs, targets in loader:
            session.forward_backward(inputs, targets, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(session.mean_loss())
        session.print("processes", session.world.size, "stages", session.world.nb_part)
        return losses
losses = notebook_launcher(by_session, (3,), num_processes=2, nb_part=2)
"""
TRAINER = """
def by_trainer(directory):
    from pathlib import Path
    from hybridtrain import HybridModel, Loader, Trainer, World
    from hybridtrain.observe import MetricsFile, TimelineFiles
    world = World.from_env()
    torch.manual_seed(0)
    model = HybridModel(Net(), world)
    files = [MetricsFile(Path(directory) / "metrics.jsonl"), TimelineFiles(Path(directory))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = Loader(data, batch_size=8, world=world)
    loss_fn = nn.functional.cross_entropy
    Trainer(model, optimizer, loss_fn, loader, steps=3, log_every=1, callbacks=files).fit()
    world.close()
notebook_launcher(by_trainer, (RUN,), num_processes=2, nb_part=2)
from hybridtrain.observe.notebook import curves_of, show_run
show_run(RUN)
print("same", [value for _, value in curves_of(RUN)["train/loss"]] == losses)
"""
FAILING = """
def fails():
    from hybridtrain import World
    world = World.from_env()
    if world.rank == 1:
        raise KeyError("from a cell")
    world.gather(None)  # waits for the one that has failed
notebook_launcher(fails, num_processes=2)
"""


@pytest.mark.timeout(500)
@pytest.mark.thorough
def test_a_notebook_trains_at_two_heights_shows_pictures_and_names_an_error(tmp_path, monkeypatch):
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    cells = [FIRST, SESSION, f"RUN = {str(tmp_path / 'run')!r}\n{TRAINER}", FAILING, "print(6 * 7)"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(book, timeout=300, kernel_name="python3", allow_errors=True).execute()
    outputs = [cell.outputs for cell in book.cells]
    texts = ["".join(o.get("text", "") for o in of_cell) for of_cell in outputs]
    errors = [o for of_cell in outputs for o in of_cell if o.output_type == "error"]
    assert len(errors) == 1, errors
    assert "processes 2 stages 2" in texts[1]
    assert "same True" in texts[2]
    assert sum("image/png" in o.get("data", {}) for o in outputs[2]) == 3
    assert errors[0].ename == "ProcessFailedError"
    assert "KeyError: 'from a cell' on rank 1 of 2" in errors[0].evalue
    assert 'raise KeyError("from a cell")' in errors[0].evalue or "in fails" in errors[0].evalue
    assert texts[4] == "42\n"


def test_what_cannot_be_sent_or_started_is_named():
    with pytest.raises(ConfigError, match="num_processes=0"):
        notebook_launcher(print, num_processes=0)
    with pytest.raises(ConfigError, match=r"function= must be .*, not 3: .*without calling it"):
        notebook_launcher(3)
    with pytest.raises(ConfigError, match=r"args= must be a tuple .* not 2: .* args=\(value,\)"):
        notebook_launcher(print, args=2)
    with pytest.raises(ConfigError, match="function= and args= cannot be sent"):
        notebook_launcher(print, (threading.Lock(),))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGRTMIN+3"])
def test_a_process_that_is_killed_is_named(name):
    number = signal.SIGRTMIN + 3 if "+" in name else signal.Signals[name]

    def ends():
        import os

        os.kill(os.getpid(), number)

    with pytest.raises(ProcessFailedError, match=rf"rank 0 of 1 .* signal {re.escape(name)} "):
        notebook_launcher(ends)


def test_the_process_that_ended_first_is_named_not_one_that_was_stopped(monkeypatch):
    def ends():
        import os
        import time

        if os.environ["RANK"] == "1":
            os._exit(3)
        time.sleep(600)

    monkeypatch.setattr(notebook, "_GRACE_S", 0.1)
    with pytest.raises(ProcessFailedError, match=r"rank 1 of 2 .* exit code 3"):
        notebook_launcher(ends, num_processes=2)


def test_a_process_that_outlives_the_function_is_not_waited_for(capfd):
    def leaves():
        import subprocess
        import sys

        left = subprocess.Popen(["sleep", "600"])  # it holds stdout
        sys.stdout.write("no newline")
        return left.pid

    pid = notebook_launcher(leaves)
    os.kill(pid, signal.SIGKILL)  # it runs, or this is an error
    assert "no newline" in capfd.readouterr().out


def test_an_end_before_the_function_returns_is_named():
    def ends():
        import os

        os._exit(0)

    with pytest.raises(
        ProcessFailedError, match="rank 0 of 1 exited with code 0 before function= returned"
    ):
        notebook_launcher(ends)
