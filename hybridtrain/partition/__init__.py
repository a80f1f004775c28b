"""A model into stages: its layers, what they cost, and where to cut."""
