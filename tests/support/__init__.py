"""What the test files share; see tests/README.md."""
