"""The commands, and the table of their names."""
