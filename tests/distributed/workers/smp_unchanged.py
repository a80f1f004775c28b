"""Runs a script as `python -m hybridtrain.smp <script>` does."""

import runpy
import sys

del sys.argv[1]  # the folder of the output
runpy.run_module("hybridtrain.smp", run_name="__main__")
