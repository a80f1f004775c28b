"""A chain of layers into stages: what the layers cost, and where to cut."""
