"""`stepspec calibrate`: finds a policy's thresholds for a pair, and certifies what they may cost in accuracy.

It records steps once, replays them to fix a path of settings from careful to fast, and tests the settings in this order
on problems that it has not used, against a limit of the loss.
"""

from stepspec.base.extras import from_extra

with from_extra("eval", "A calibration"):
    from stepspec.evaluation.calibrate.calibration import Budget, CalibrationWatcher, Sizes, check_policy
    from stepspec.evaluation.calibrate.records import Calibrated, Measure, Tested
    from stepspec.evaluation.calibrate.task import CalibrationPlan, calibrate, load_task

__all__ = [
    "Budget",
    "Calibrated",
    "Measure",
    "CalibrationPlan",
    "Sizes",
    "Tested",
    "CalibrationWatcher",
    "calibrate",
    "check_policy",
    "load_task",
]
