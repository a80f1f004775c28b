"""Checkpoints: what a resume needs, in directories that are either whole or not there."""
