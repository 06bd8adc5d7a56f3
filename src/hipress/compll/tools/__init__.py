"""Tools for people: show a program stage by stage, and emit it as a package."""
