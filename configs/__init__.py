"""The config groups, as YAML; shipped in the package as `hybridtrain.configs`."""
