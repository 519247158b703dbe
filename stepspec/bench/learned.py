"""A learned judge beside each of its signals alone: `python -m stepspec.bench.learned RECORDED --json FILE`.

RECORDED is a run with recorded steps, such as the folder `recorded` of a calibration. A judge of all signals and one of
each signal are fitted on half of the problems. With thresholds that accept given shares of the steps, their policies
are replayed over the other half.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from stepspec.errors import StepSpecError
from stepspec.evaluation.replay import Recordings, read_recordings, replay
from stepspec.evaluation.replay.fitting import fit_judge, judged_by
from stepspec.evaluation.replay.path import changed_policy, thresholds_of
from stepspec.evaluation.replay.recordings import Key
from stepspec.evaluation.report.cells import UNKNOWN
from stepspec.evaluation.report.tables import markdown_table
from stepspec.loop.judges.learned import SIGNALS
from stepspec.loop.policy import Policy

V = TypeVar("V")
EVERY = "all signals"
SHARES = (0.65, 0.8, 0.9)
"""Shares of the recorded steps that the thresholds accept."""


@dataclass(frozen=True)
class Point:
    """A policy with the judge, by replay."""

    share: float
    """Share of the steps that the threshold was chosen to accept. More are accepted where many scores are equal."""
    accepted: float | None
    """Share of the judged steps that are accepted; None if none is judged."""
    speedup: float
    """Over the target."""


@dataclass(frozen=True)
class Compared:
    """A judge of some signals.

    Attributes:
        signals: one signal, or `EVERY`.
        area: under the ROC curve, for whether a step led to a right answer, on held-out problems.
        area_interval: of the area.
        why: why there is no area.
        points: policies with the judge.
    """

    signals: str
    area: float | None
    area_interval: tuple[float, float] | None
    why: str | None
    points: Sequence[Point]


def compared(recordings: Recordings) -> Iterator[Compared]:
    """Yield the judge of all signals, and one of each signal.

    Raises:
        UsageError: the run has too few steps, or all are good or all bad.
    """
    fitting, replaying = (_half(recordings, half) for half in (0, 1))
    areas = fit_judge(recordings, "answers", [*SIGNALS]).areas
    names = {EVERY: [*SIGNALS], **{name: [name] for name in SIGNALS}}
    policies = {key: _with_judge(fitting, signals) for key, signals in names.items()}
    swept = {
        (key, share): changed_policy(policy, thresholds, policy.salvage and policy.salvage.min_logprob)
        for key, policy in policies.items()
        for share, thresholds in zip(SHARES, thresholds_of(key, policy, replaying.recordings, SHARES), strict=True)
    }
    found = dict(
        zip(swept, replay({f"{key} {share}": swept[key, share] for key, share in swept}, replaying), strict=True)
    )
    for key in names:
        area = areas["learned" if key == EVERY else key]
        points = [Point(share, each.step_acceptance, each.speedup) for share in SHARES for each in [found[key, share]]]
        yield Compared(key, area.value, area.interval, area.why, points)


def _half(recordings: Recordings, half: int) -> Recordings:
    """Return every other problem of a run."""
    problems = {problem: place for place, problem in enumerate(dict.fromkeys(key[0] for key in recordings.keys))}
    kept = {key for key in recordings.keys if problems[key[0]] % 2 == half}
    return replace(
        recordings,
        recordings=[replace(each, requests=_only(kept, each.requests)) for each in recordings.recordings],
        baselines={name: _only(kept, rows) for name, rows in recordings.baselines.items()},
    )


def _only(kept: set[Key], values: Mapping[Key, V]) -> dict[Key, V]:
    return {key: value for key, value in values.items() if key in kept}


def _with_judge(recordings: Recordings, signals: Sequence[str]) -> Policy:
    fitted = fit_judge(recordings, "answers", signals)
    text = recordings.run.policies[recordings.recordings[0].name].text
    return Policy.model_validate(tomllib.loads(judged_by(text, fitted.table(), cascade=False, comments=())))


def learned_block(file: Path) -> str:
    """Return a Markdown table of what `--json` wrote."""
    head = ("signals", "area", *(f"{share:.0%} of the steps" for share in SHARES))
    found = [
        Compared(**(each | {"points": [Point(**point) for point in each["points"]]}))
        for each in json.loads(file.read_text("utf-8"))["judges"]
    ]
    return markdown_table(head, [[each.signals, _area_in_words(each), *map(_in_words, each.points)] for each in found])


def _area_in_words(found: Compared) -> str:
    if found.area is None or found.area_interval is None:
        return UNKNOWN
    return "{:.3f} [{:.3f}, {:.3f}]".format(found.area, *found.area_interval)


def _in_words(point: Point) -> str:
    accepted = UNKNOWN if point.accepted is None else f"{point.accepted:.0%}"
    return f"{point.speedup:.2f}× ({accepted} accepted)"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m stepspec.bench.learned", description=__doc__)
    parser.add_argument("recorded", type=Path, help="folder of the run with recorded steps")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="file for the comparison")
    arguments = parser.parse_args()
    try:
        recordings = read_recordings(arguments.recorded)
        found = [*compared(recordings)]
    except StepSpecError as error:
        print(error, file=sys.stderr)
        return 2
    run = recordings.run
    about = {"benchmark": run.benchmark, "temperature": run.temperature, "problems": len(recordings.keys)}
    arguments.json.write_text(json.dumps(about | {"judges": [asdict(each) for each in found]}, indent=1) + "\n")
    print(learned_block(arguments.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
