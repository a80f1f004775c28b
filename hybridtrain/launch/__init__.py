"""How the processes of a run are started and find one another."""
