"""The command line and what it builds: configs, runs and their directories."""

from hybridtrain.app.cli import main

__all__ = [
    "main",
]
