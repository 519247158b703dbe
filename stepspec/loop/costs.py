"""What chains of draft steps cost, by the latest ones that were measured."""

MEMORY = 0.98
"""What an observation counts after the next one of its kind. The memory is of about 50 observations."""


class Mean:
    """A mean of the latest values, each with a weight."""

    def __init__(self, value: float = 0.0, weight: float = 0.0) -> None:
        self._sum, self.weight = value * weight, weight

    def note(self, value: float, weight: float = 1.0) -> None:
        """Add a value."""
        self._sum, self.weight = MEMORY * self._sum + value * weight, MEMORY * self.weight + weight

    @property
    def value(self) -> float:
        """The mean; 0 without values."""
        return self._sum / self.weight if self.weight else 0.0


class Line:
    """A line through the latest pairs of a number of tokens and the seconds that they took."""

    def __init__(self) -> None:
        self._tokens, self._seconds, self._squares, self._products = Mean(), Mean(), Mean(), Mean()

    def note(self, num_tokens: float, seconds: float) -> None:
        """Add a pair."""
        values = num_tokens, seconds, num_tokens**2, num_tokens * seconds
        for mean, value in zip((self._tokens, self._seconds, self._squares, self._products), values, strict=True):
            mean.note(value)

    @property
    def is_known(self) -> bool:
        """Whether there is a pair."""
        return self._tokens.weight > 0

    def at(self, num_tokens: float) -> float:
        """Return the seconds that some tokens take. Only after a first pair.

        As long as all pairs have equally many tokens, half of the seconds are taken to be independent of them.
        """
        tokens, seconds = self._tokens.value, self._seconds.value
        variance = self._squares.value - tokens**2
        covariance = self._products.value - tokens * seconds
        slope = covariance / variance if variance > tokens**2 / 100 else seconds / tokens / 2
        slope = min(max(slope, 0.0), seconds / tokens)
        return seconds + slope * (num_tokens - tokens)


class ChainCosts:
    """What the draft's steps and the target's passes over them take.

    Attributes:
        step_tokens: tokens of a draft step.
    """

    def __init__(self) -> None:
        self.step_tokens = Mean()
        self._drafting, self._reading = Line(), Line()
        self.forget()

    def forget(self) -> None:
        """Drop what was learned from texts, how often a chain ends the thinking. The costs are preserved."""
        self._ends = Mean()

    def drafted(self, num_tokens: int, seconds: float) -> None:
        """Note that a step was drafted."""
        self._drafting.note(max(1, num_tokens), seconds)
        self.step_tokens.note(num_tokens)

    def read(self, num_tokens: int, seconds: float) -> None:
        """Note that the target has read tokens in one pass to judge steps."""
        self._reading.note(num_tokens, seconds)

    def proposed(self, *, ends: bool) -> None:
        """Note that a chain was proposed, and whether it ends the thinking."""
        self._ends.note(ends)

    def asks_for_end(self) -> bool:
        """Return whether to ask the draft after a chain if it ends the thinking there.

        Where it does, that saves a pass of the target; elsewhere the call was in vain.
        """
        if not (self._drafting.is_known and self._reading.is_known):
            return True
        share = self._ends.value
        return share * self.pass_s(1) > (1 - share) * self._drafting.at(1)

    def continues(self, num_tokens: int, token_s: float) -> bool:
        """Return whether the draft and a pass of the target take less than the target for the rest of a step.

        Args:
            num_tokens: tokens of the rest.
            token_s: seconds that the target takes for one.
        """
        if not (self._drafting.is_known and self._reading.is_known):
            return True
        return self._drafting.at(num_tokens) + self.pass_s(num_tokens) < num_tokens * token_s

    def pass_s(self, num_tokens: float) -> float:
        """Return the seconds of a pass that reads some tokens. Only after a first pass."""
        return self._reading.at(num_tokens)
