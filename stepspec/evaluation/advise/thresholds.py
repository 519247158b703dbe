"""Thresholds of the policy `two-level` for the user's models, from replays of a few recorded prompts.

The shipped thresholds were set on the embedded pair. The ones that are chosen here are not certified: the run of all
policies, and not this choice, says whether the policy keeps the answers.
"""

import asyncio
import tomllib
from collections.abc import Sequence
from pathlib import Path

from stepspec.errors import UsageError
from stepspec.evaluation.advise.policy_file import policy_text
from stepspec.evaluation.advise.rule import MAX_LOST
from stepspec.evaluation.records import BASELINE
from stepspec.evaluation.replay import Recordings, read_recordings
from stepspec.evaluation.replay.path import Setting, make_path
from stepspec.evaluation.run import LoadedPolicy
from stepspec.loop.policy import Policy

RECORDED = 10
"""Prompts whose steps are recorded."""


async def chosen_thresholds(text: str, folder: Path) -> str:
    """Return the text of a policy file with thresholds for recorded prompts; empty if the recording shows none.

    It takes the fastest setting that is likely to lose at most a point of the recorded answers.

    Args:
        text: the text of the policy file.
        folder: the folder of a recorded run of the policy.
    """
    policy = Policy.model_validate(tomllib.loads(text))
    try:
        recordings = read_recordings(folder)
        path = await asyncio.to_thread(make_path, "two-level", policy, recordings)
    except UsageError:  # the draft proposed no step that was judged
        return ""
    setting = _fastest(path, recordings)
    if setting is None:
        return ""
    comment = f"Its thresholds were chosen by replays of {len(recordings.keys)} prompts. They are not certified."
    return policy_text(text, [comment], setting.thresholds, setting.min_logprob)


def _fastest(path: Sequence[Setting], recordings: Recordings) -> Setting | None:
    target = recordings.baselines[BASELINE].values()
    accuracy = sum(row.status == "correct" for row in target) / len(target)
    kept = [each for each in path if each.replayed.likely_correct >= accuracy - MAX_LOST]
    return max(kept, key=lambda each: each.replayed.speedup, default=None)


def fitted(text: str, loaded: LoadedPolicy) -> LoadedPolicy:
    """Return a policy with new thresholds as the pair runs it, with the drafter of the policy that it replaces."""
    policy = Policy.model_validate(tomllib.loads(text))
    return policy.model_copy(update={"token": loaded[0].token}), text
