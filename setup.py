"""Finds the packages of the wheel; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

# `packages.find` in pyproject.toml cannot add the two folders of the repository's top level that
# are packages of the wheel.
DATA = ["hybridtrain.configs", "hybridtrain.recipes"]

setup(packages=[*find_packages(include=["hybridtrain*"]), *DATA])
