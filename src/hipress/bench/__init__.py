"""What measures: the workers, rows and baselines of every benchmark, and their pictures."""
