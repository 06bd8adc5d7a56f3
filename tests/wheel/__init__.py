"""The distributions, and the wheel in an empty environment: `make dist`."""
