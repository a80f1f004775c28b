"""A model into a chain of layers: as it stands, or traced."""
