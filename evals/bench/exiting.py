"""How a command of a checkout ends."""

import sys
from collections.abc import Callable

from stepspec.errors import StepSpecError


def exit_code(work: Callable[[], None]) -> int:
    """Run a command. Return 0, or 2 after an error that the user can correct, which is printed."""
    try:
        work()
    except StepSpecError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
