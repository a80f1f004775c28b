"""Whole runs, as YAML; shipped in the package as `hybridtrain.recipes`."""
