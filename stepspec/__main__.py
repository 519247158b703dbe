"""Run the `stepspec` command with `python -m stepspec`."""

from stepspec.cli import main

if __name__ == "__main__":
    main()
