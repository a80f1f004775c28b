"""What executes a schedule."""
