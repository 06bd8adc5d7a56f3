"""The backends: passes in, the source of a Python module out."""
