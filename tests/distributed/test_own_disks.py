"""Hosts with their own disks: what differs between them is found before the first step."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.launch import SMALL, forked_script
from support.small_data import write_images, write_texts, write_tokenizer

CPU = ["world.devices=cpu", "monitor.tensorboard=false", "trainer.epochs=null", "trainer.steps=2"]
IMAGES = [*CPU, "data=image_folder", "data.root=data"]
TEXTS = [*CPU, "recipe=gpt_text_files", "data.path=data"]
TOKENS = [*CPU, "recipe=gpt_token_files", "data.root=data", "data.train=*.npy", "data.eval=null"]


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """The folders `data` of two hosts; they are not made."""
    return [tmp_path / f"host{rank}" / "data" for rank in (0, 1)]


def error_of(tmp_path: Path, *arguments: str) -> str:
    status, output = forked_script(2, "own_disk.py", tmp_path, *arguments)
    assert status == 2, output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert not list(tmp_path.glob("host*/outputs"))  # it ends before anything is written
    return error


@pytest.mark.thorough
def test_another_number_of_images_on_one_host_is_an_error(tmp_path, disks):
    for disk, images in zip(disks, (4, 3), strict=True):
        write_images(disk, {"train": images})
    error = error_of(tmp_path, *IMAGES)
    assert "samples to train on" in error
    assert "12 on rank 0 (host0), 9 on rank 1 (host1)" in error


@pytest.mark.thorough
def test_another_number_of_images_to_evaluate_on_is_an_error(tmp_path, disks):
    for disk, images in zip(disks, (2, 3), strict=True):
        write_images(disk, {"train": 4, "val": images})
    error = error_of(tmp_path, *IMAGES)
    assert "samples to evaluate on" in error
    assert "6 on rank 0 (host0), 9 on rank 1" in error


@pytest.mark.thorough
def test_other_names_of_classes_on_one_host_are_an_error(tmp_path, disks):
    for disk in disks:
        write_images(disk, {"train": 4})
    (disks[1] / "train" / "red").rename(disks[1] / "train" / "crimson")
    assert (
        "['blue', 'green', 'red'] on rank 0 (host0), ['blue', 'crimson', 'green'] on rank 1 (host1)"
    ) in error_of(tmp_path, *IMAGES)


def test_other_images_of_equal_number_are_an_error(tmp_path, disks):
    for disk in disks:
        write_images(disk, {"train": 4})
    (disks[1] / "train" / "red" / "3.png").rename(disks[1] / "train" / "red" / "4.png")
    error = error_of(tmp_path, *IMAGES)
    assert "data files" in error
    assert "on rank 0 (host0)" in error
    assert "on rank 1 (host1)" in error
    assert "use a folder that they share for data.root=data" in error


@pytest.mark.thorough
def test_another_tokenizer_with_as_many_tokens_is_an_error(tmp_path, disks):
    pytest.importorskip("transformers")
    for disk in disks:
        write_texts(disk)
        write_tokenizer(disk.parent / "tokenizer.json")
    other = disks[1].parent / "tokenizer.json"
    described = json.loads(other.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["film"], vocabulary["movie"] = vocabulary["movie"], vocabulary["film"]
    other.write_text(json.dumps(described))
    error = error_of(tmp_path, *TEXTS, "data.tokenizer=./tokenizer.json", "data.seq_len=8")
    assert "the vocabulary of the tokenizer" in error


@pytest.mark.thorough
def test_other_texts_of_equal_length_are_an_error(tmp_path, disks):
    for disk in disks:
        write_texts(disk)
    (disks[1] / "0.txt").rename(disks[1] / "9.txt")  # read last
    error = error_of(tmp_path, *TEXTS, "data.seq_len=16")
    assert "data files" in error


@pytest.mark.thorough
def test_a_cut_token_file_with_as_many_windows_is_an_error(tmp_path, disks):
    for disk, tokens in zip(disks, (999, 998), strict=True):
        disk.mkdir(parents=True)
        np.save(disk / "a.npy", np.arange(tokens, dtype=np.uint16) % 50)
    error = error_of(tmp_path, *TOKENS, "data.vocab_size=50", "data.seq_len=16")
    assert "data files" in error


def test_another_version_of_a_package_is_one_warning_and_the_run_goes_on(tmp_path, disks):
    for disk in disks:
        disk.mkdir(parents=True)
    (disks[1].parent / "versions.json").write_text(json.dumps({"numpy": "0.1", "torch": "0.2"}))
    output_dir = f"output_dir={tmp_path / 'outputs'}"
    arguments = [*SMALL, "trainer.steps=2", "monitor.tensorboard=false", output_dir]
    status, output = forked_script(2, "own_disk.py", tmp_path, *arguments)
    assert status == 0, output
    assert output.count("the ranks run different versions: ") == 1
    (line,) = [text for text in output.splitlines() if "run different versions" in text]
    assert "0.1 on rank 1 (host1)" in line
    assert "0.2 on rank 1 (host1)" in line


@pytest.mark.thorough
def test_the_same_files_on_each_disk_train(tmp_path, disks):
    for disk in disks:
        write_texts(disk)
    small = ["data.seq_len=16", "data.batch_size=4", "model.d_model=16", "model.n_head=2"]
    small += ["model.n_layer=2", "pipeline.nb_part=2", f"output_dir={tmp_path / 'outputs'}"]
    status, output = forked_script(2, "own_disk.py", tmp_path, *TEXTS, *small)
    assert status == 0, output
    assert "different versions" not in output


@pytest.mark.thorough
def test_a_run_that_only_one_host_has_goes_on_by_what_the_error_says(tmp_path, disks):
    hosts = [disk.parent for disk in disks]
    for host in hosts:
        host.mkdir()

    def run(steps: int, *words: str) -> tuple[int | None, str]:
        shown = [*SMALL, *words, f"trainer.steps={steps}", "monitor.report=false"]
        return forked_script(2, "own_disk.py", tmp_path, *shown)

    alone = "pipeline.nb_part=1"
    status, output = run(2, alone)
    assert status == 0, output
    shutil.rmtree(hosts[1] / "outputs", ignore_errors=True)
    status, output = run(4)
    assert status == 2
    assert "does not see the run directory: set pipeline.nb_part= on the command line" in output
    status, output = run(4, alone)
    assert status == 0, output
    shutil.rmtree(hosts[1] / "outputs", ignore_errors=True)
    (hosts[0] / "outputs").rename(hosts[1] / "outputs")
    status, output = run(6, alone)
    assert status == 2
    assert "or copy that checkpoint to host0" in output
    shared = tmp_path / "shared"
    shutil.copytree(hosts[1] / "outputs", shared)
    status, output = run(6, alone, f"output_dir={shared}")
    assert status == 0, output
    shutil.rmtree(hosts[0] / "outputs", ignore_errors=True)
    shutil.copytree(hosts[1] / "outputs", hosts[0] / "outputs")
    status, output = run(6, alone)
    assert status == 0, output
    assert "resumed from outputs/digits/checkpoints/step_00000004" in output
