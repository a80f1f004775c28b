"""The command line and what it builds: configs, runs and their directories."""
