"""Shows the curves and the timeline of a run in a notebook."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from hybridtrain.launch import notebook_launcher
from hybridtrain.observe.pictures import Curve, draw_accounts, draw_curves
from hybridtrain.observe.report.record import accounts_of, curves_of

__all__ = ["curves_of", "notebook_launcher", "pictures_of", "show_run"]


def show_run(directory: str | Path) -> None:
    """Shows the losses, time breakdown and last timeline of a run in a notebook.

    Args:
        directory: the run directory, where `MetricsFile` and `TimelineFiles` write.

    Raises:
        DataError: the directory has no `metrics.jsonl`.
    """
    from IPython.display import display

    for picture in pictures_of(directory):
        display(picture)


def pictures_of(directory: str | Path) -> list[Image.Image]:
    """Returns the pictures that `show_run` shows."""
    directory = Path(directory)
    curves, name = curves_of(directory), directory.resolve().name
    losses: dict[str, Curve] = {
        tag: curve for tag, curve in curves.items() if tag.endswith("/loss")
    }
    pictures = [draw_curves(losses, name)]
    if accounts := accounts_of(curves):
        pictures.append(draw_accounts(accounts, name))
    timeline = directory / "timeline.png"
    if timeline.exists():
        with Image.open(timeline) as image:
            pictures.append(image.copy())
    return pictures
