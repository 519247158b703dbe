"""What recorded steps cost: as measured in the run, or with the measured costs of other hardware.

`stepspec costs models` writes the file of other hardware. Passes of the target between two measured widths are
interpolated; wider ones are an extrapolation, which is counted.
"""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError

from stepspec.errors import UsageError
from stepspec.evaluation.records import Conditions, EngineRecord, ResultRow

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class HardwareCosts(Conditions):
    """The file that `stepspec costs models` writes: what one request at a time costs on a machine."""

    version: Literal[1] = 1
    engines: dict[str, EngineRecord | None]
    draft_token_s: Seconds
    """Seconds per token that the draft writes."""
    pass_s: dict[Annotated[int, Field(ge=1)], Seconds] = Field(min_length=1)
    """Seconds of a pass of the target by the number of tokens that it reads; over one token, it writes one."""

    @property
    def widest(self) -> int:
        """Number of tokens of the widest pass that was measured."""
        return max(self.pass_s)

    def pass_over(self, num_tokens: float) -> float:
        """Return the seconds of a pass over some tokens, in proportion to the widest one beyond it."""
        widths = sorted(self.pass_s)
        if num_tokens > widths[-1]:
            return self.pass_s[widths[-1]] * num_tokens / widths[-1]
        return float(np.interp(num_tokens, widths, [self.pass_s[width] for width in widths]))

    def request_s(self, row: ResultRow, num_judged: int, drafts: bool) -> float:
        """Return the seconds of a recorded request without its steps: what the target wrote, token by token or drafted.

        Args:
            row: the row of the request.
            num_judged: passes of the target over proposed steps.
            drafts: whether the draft model drafts tokens; other drafters take no time.
        """
        passes = row.target_passes - num_judged
        if passes <= 0:
            return 0.0
        drafting_s = row.token_drafted * self.draft_token_s if drafts else 0.0
        return passes * self.pass_over(1 + row.token_drafted / passes) + drafting_s


def read_costs(file: Path) -> HardwareCosts:
    """Read a file of costs.

    Raises:
        UsageError: the file cannot be read, or is none.
    """
    try:
        return HardwareCosts.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}.") from error
    except ValidationError as error:
        raise UsageError(f"{file} has no costs. Write a file of costs with 'stepspec costs models --json'.") from error
