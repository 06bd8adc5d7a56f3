"""See run.py."""
