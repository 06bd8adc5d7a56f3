"""The command line: one command, one file, listed in `hipress.cli.main`."""
