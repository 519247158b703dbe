"""Replays policies over the recorded steps of a run, on a CPU in seconds.

A replay decides again about every step that a draft proposed in the run, under other thresholds or judges, and adds up
what the decisions would have cost. It is exact as long as a policy decides as the recorded one did. After the first
other decision the text would have gone on otherwise: from there on, a replay is an estimate, and says so.

recordings = read_recordings(Path("runs/mine"))
replayed = replay({"bold": load_policy("bold.toml")[0]}, recordings)
"""

from stepspec.base.extras import from_extra

with from_extra("eval", "A replay"):
    from stepspec.evaluation.replay.costs import HardwareCosts, read_costs
    from stepspec.evaluation.replay.recordings import Recording, Recordings, read_recordings
    from stepspec.evaluation.replay.totals import Replayed, front, replay

__all__ = [
    "HardwareCosts",
    "Recording",
    "Recordings",
    "Replayed",
    "front",
    "read_costs",
    "read_recordings",
    "replay",
]
