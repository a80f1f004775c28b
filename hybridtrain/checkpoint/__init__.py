"""Checkpoints: the state that a resume needs, in directories that are complete or absent."""
