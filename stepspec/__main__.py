"""`python -m stepspec` is the `stepspec` command."""

from stepspec.cli import main

if __name__ == "__main__":
    main()
