"""Training jobs: data sets, small models, and what compression does to their accuracy."""
