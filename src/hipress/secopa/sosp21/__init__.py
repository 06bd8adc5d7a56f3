"""The published planner of SOSP'21, its clusters and its scaling curves."""
