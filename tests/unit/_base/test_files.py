"""Files and folders that appear whole or not at all."""

from pathlib import Path

import pytest

from hybridtrain._base.files import atomic_folder


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_folder_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, failing: int
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("good")
    rename, calls = Path.replace, 0

    def fails_once(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", fails_once)
    with pytest.raises(type(error)), atomic_folder(folder) as new:
        (new / "weights").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "weights").read_text() == "good"


def test_a_folder_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "model") as new:
            (new / text).write_text(text)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "model",
        "model/new",
    ]
