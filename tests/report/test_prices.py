"""The cost of a problem, computed from measured blocks, and the measured share of the run."""

from pathlib import Path

import pytest

from stepspec.base.file_model import load_toml
from stepspec.errors import UsageError
from stepspec.evaluation.records import Block, ModelUsage
from stepspec.evaluation.report.prices import Cost, Prices, cost_figure, costs

TABLE = """
currency = "EUR"
per_machine_hour = 3.6
[per_million.target]
input = 1.0
cached = 0.1
output = 10
[per_million.draft]
input = 0.5
output = 1.0
"""
USAGE = {
    "target": ModelUsage(prompt_tokens=3_000_000, cached_tokens=1_000_000, generated_tokens=100_000),
    "draft": ModelUsage(prompt_tokens=2_000_000, cached_tokens=2_000_000, generated_tokens=500_000),
}


def read(text: str, folder: Path) -> Prices:
    file = folder / "prices.toml"
    file.write_text(text, "utf-8")
    return load_toml(file, Prices)[0]


def block(policy: str, num_jobs: int, usage: dict[str, ModelUsage] | None, wall_s: float = 1000.0) -> Block:
    jobs = [(f"p{number}", 0) for number in range(num_jobs)]
    return Block(policy=policy, jobs=jobs, wall_s=wall_s, committed_tokens=1, usage=usage)


def test_tokens_and_machine_hours_add_up(tmp_path: Path) -> None:
    # Target 2 + 0.1 + 1, draft 1 + 0.5 (without a price for cached input, it costs as much as other input), machine 1.
    assert read(TABLE, tmp_path).of(block("step", 1, USAGE)) == pytest.approx(3.1 + 1.5 + 1.0)


def test_tokens_of_a_role_without_a_price_cost_nothing(tmp_path: Path) -> None:
    prices = read(TABLE.split("[per_million.draft]")[0], tmp_path)
    assert prices.of(block("step", 1, USAGE)) == pytest.approx(3.1 + 1.0)


def test_blocks_without_token_counts_are_left_out_and_lower_the_share(tmp_path: Path) -> None:
    prices = read(TABLE, tmp_path)
    known = costs([block("step", 3, USAGE), block("step", 1, None), block("old", 2, None)], prices)
    assert known == {"step": Cost(pytest.approx(5.6 / 3), 3)}
    figure = cost_figure(known, {"step": 4, "old": 2}, prices)
    assert figure.title == "EUR per problem"
    assert figure.cells == {"step": ("1.87", "(on 75.0%)"), "old": ("–", "")}


def test_machine_hours_need_no_token_counts(tmp_path: Path) -> None:
    prices = read('currency = "USD"\nper_machine_hour = 3.6', tmp_path)
    assert costs([block("step", 4, None)], prices) == {"step": Cost(pytest.approx(0.25), 4)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('currency = "EUR"', "per_machine_hour"),
        ("per_machine_hour = 1", "currency"),
        ('currency = "EUR"\nper_machine_hour = -1', "per_machine_hour"),
        ('currency = "EUR"\nper_machine_hour = inf', "per_machine_hour"),
        ('currency = "EUR"\n[per_million.judge]\ninput = 1\noutput = 1', "judge"),
        ('currency = "EUR"\n[per_million.target]\ninput = 1\nouput = 1', "ouput"),
    ],
)
def test_an_invalid_price_table_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(text, tmp_path)
