"""The `stepspec` command, also as `python -m stepspec`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while it loads ends it without a traceback, too."""
    try:
        from stepspec.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
