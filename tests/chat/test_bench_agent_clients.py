"""The clients of `python -m evals.bench agent`, against a service on loopback."""

import pytest
from following import following_pair
from service import serving

from evals.bench.agent_clients import clients
from evals.bench.agent_runs import EARLY, compare, runs_left
from evals.bench.agent_tasks import CALCULATE, Call, Task, Tool, Turn

ECHO = Tool("echo", "Says a word.", {"text": "string"}, lambda _, text: text)
TASK = Task(
    (CALCULATE, ECHO),
    (
        Turn("Please calculate '3 * 4'.", Call("calculate", {"expression": "3 * 4"})),
        Turn("Please echo 'two words'.", Call("echo", {"text": "two words"})),
        Turn("Thank you.", Call("echo", {"text": "nothing"})),
    ),
    "Thank you.",
    0.3,
)


@pytest.mark.parametrize("client", ["langchain", "anthropic"])
def test_a_client_runs_the_tools_and_divides_the_time(client: str) -> None:
    with serving(following_pair(delay_s=0.01), "two-level") as address:
        begin = clients(address.removesuffix("/v1"), "none", 0.0)
        runs = [*compare([TASK], begin, runs_left([TASK], [client], ["target", EARLY]))]
    assert [run.policy for run in runs] == ["target", EARLY][: 2 if client == "langchain" else 1]
    for run in runs:
        assert run.calls_right == [True, True, False]
        assert run.solved
        assert run.num_requests == 5
        assert min(run.reading_s, run.text_s, run.calls_s) > 0
        assert run.reading_s + run.text_s + run.calls_s + run.tools_s <= run.seconds
    assert runs[0].tools_s > 0.3
    assert runs[0].early is None
    if client == "langchain":
        early = runs[1].early
        assert early is not None
        assert (early.started, early.used) == (1, 1)
        assert early.saved_s > 0
        assert runs[1].tools_s < runs[0].tools_s
