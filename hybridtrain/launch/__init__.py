"""Starting the processes of a run, and reading what the launcher says of them."""
