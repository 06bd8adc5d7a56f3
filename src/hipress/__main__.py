"""`python -m hipress`: the command line, also where the folder of scripts is not on the path."""

from hipress.cli.main import main

if __name__ == "__main__":
    main()
