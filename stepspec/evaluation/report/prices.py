"""Cost of a problem at given prices, computed from the blocks of a run. A price table is a TOML file:

currency = "EUR"
per_machine_hour = 2.5      # in addition to, or instead of:

[per_million.target]        # tokens
input = 0.5
cached = 0.05               # input tokens from a cache; default: the price of input
output = 1.5

[per_million.draft]
input = 0.05
output = 0.1
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import Field, model_validator

from stepspec.base.file_model import FileModel
from stepspec.evaluation.records import Block, ModelUsage
from stepspec.evaluation.report.cells import UNKNOWN, Cell, percent, significant
from stepspec.evaluation.report.figures import Extra


class TokenPrices(FileModel):
    """Prices of a million tokens of one model."""

    input: float = Field(ge=0)
    cached: float | None = Field(default=None, ge=0)
    """Price of input tokens from a cache. Default: the price of input."""
    output: float = Field(ge=0)

    def of(self, usage: ModelUsage) -> float:
        """Return the cost of the tokens."""
        cached = self.input if self.cached is None else self.cached
        new_tokens = usage.prompt_tokens - usage.cached_tokens
        millionths = new_tokens * self.input + usage.cached_tokens * cached + usage.generated_tokens * self.output
        return millionths / 1e6


class RolePrices(FileModel):
    """Token prices by role. The tokens of a role without prices are free."""

    target: TokenPrices | None = None
    draft: TokenPrices | None = None

    def named(self) -> dict[str, TokenPrices]:
        """Return the given prices by role."""
        return {role: prices for role, prices in (("target", self.target), ("draft", self.draft)) if prices}


class Prices(FileModel):
    """A price table: prices of tokens by role, of machines by the hour, or both, which are then added."""

    currency: str = Field(min_length=1, max_length=16)
    per_million: RolePrices = RolePrices()
    per_machine_hour: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _some_price(self) -> "Prices":
        if not self.per_million.named() and self.per_machine_hour is None:
            raise ValueError("it needs per_machine_hour or a table of tokens such as [per_million.target]")
        return self

    def of(self, block: Block) -> float | None:
        """Return the cost of a block, or None if tokens have a price but were not counted."""
        if self.per_million.named() and block.usage is None:
            return None
        usage = block.usage or {}
        tokens = sum(prices.of(usage[role]) for role, prices in self.per_million.named().items() if role in usage)
        return tokens + (self.per_machine_hour or 0.0) * block.wall_s / 3600


@dataclass(frozen=True)
class Cost:
    """Mean cost of a policy's problems, over the rows whose cost is known."""

    per_problem: float
    num_measured: int
    """Rows in blocks whose cost is known."""


def costs(blocks: Iterable[Block], prices: Prices) -> dict[str, Cost]:
    """Return the mean cost of a problem by policy. Policies without a known cost are omitted."""
    totals: dict[str, tuple[float, int]] = {}
    for block in blocks:
        money = prices.of(block)
        if money is not None and block.jobs:
            before = totals.get(block.policy, (0.0, 0))
            totals[block.policy] = before[0] + money, before[1] + len(block.jobs)
    return {policy: Cost(money / num_jobs, num_jobs) for policy, (money, num_jobs) in totals.items()}


def cost_figure(known: Mapping[str, Cost], num_rows: Mapping[str, int], prices: Prices) -> Extra:
    """Return the cost as a table row.

    Args:
        known: the cost by policy.
        num_rows: the number of rows of each policy in the table.
        prices: the price table.
    """
    return Extra(
        f"{prices.currency} per problem",
        f"mean cost at the given prices ({_in_words(prices)}); in parentheses, the share of rows with a known cost",
        {policy: _cell(known.get(policy), rows) for policy, rows in num_rows.items()},
        {policy: cost.per_problem for policy, cost in known.items()},
    )


def _cell(cost: Cost | None, num_rows: int) -> Cell:
    if cost is None:
        return UNKNOWN, ""
    share = min(1.0, cost.num_measured / num_rows) if num_rows else 0.0
    return significant(cost.per_problem), f"(on {percent(share)})"


def _in_words(prices: Prices) -> str:
    parts = [
        f"{role}: {tokens.input:g} in, {tokens.input if tokens.cached is None else tokens.cached:g} cached, "
        f"{tokens.output:g} out per million tokens"
        for role, tokens in prices.per_million.named().items()
    ]
    if prices.per_machine_hour is not None:
        parts.append(f"{prices.per_machine_hour:g} per machine-hour")
    return "; ".join(parts)
