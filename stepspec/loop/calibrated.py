"""Calibrated settings: the thresholds of a policy for one pair of models, at one temperature.

`stepspec calibrate` finds them. Each is a JSON file in a folder named by the hash of the pair. Those of the user count
before those that ship with stepspec.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from stepspec.base.file_model import FileModel, Version
from stepspec.base.files import data_folder, write_text
from stepspec.errors import UsageError, reason_of
from stepspec.loop.certificate import NEXT_STEP, Certificate, Sha256
from stepspec.loop.policy import Policy

FOLDER = "thresholds"
UNKNOWN = f"Without thresholds for these models the policy is token-level speculation, which is exact. {NEXT_STEP}"


class CalibratedSetting(FileModel):
    """What a calibration found for a policy on a pair of models, at one temperature."""

    version: Version = 1
    policy_sha256: Sha256
    """See `Policy.settings_sha256`: an edited policy is another one."""
    pair: str
    """The models in words."""
    temperature: float = Field(ge=0)
    """Requests at up to this temperature take the setting, unless there is one for a lower temperature."""
    steps: bool = True
    """Whether the draft proposes steps. If not, the policy is token-level speculation on these models."""
    thresholds: Mapping[str, float] = Field(default_factory=dict[str, float])
    """The threshold of each judge, by the judge's name."""
    min_logprob: float | None = Field(default=None, le=0)
    """Replaces `min_logprob` of `[salvage]`."""
    certificate: Certificate | None = None
    """What is known about the accuracy with these thresholds."""
    sentences: Sequence[str] = ()
    """What the calibration found, in words; at least one without steps."""

    @model_validator(mode="after")
    def _says_why_there_are_no_steps(self) -> "CalibratedSetting":
        if not (self.steps or self.sentences):
            raise ValueError("a setting without steps needs a sentence")
        return self

    def applied(self, policy: Policy) -> Policy:
        """Return the policy with this setting."""
        return policy.with_thresholds(self.thresholds, self.min_logprob) if self.steps else policy.without_steps()

    @property
    def reads_prompts(self) -> bool:
        """Whether `notes` compares prompts."""
        return self.steps and self.certificate is not None and self.certificate.least_logprob is not None

    def notes(
        self,
        models: Mapping[str, Mapping[str, str]],
        max_overhead: float | None = None,
        prompts: Sequence[float] = (),
        **request: float | str | None,
    ) -> list[tuple[Sequence[str], str]]:
        """Return what a user has to know of the setting for a request. Arguments are those of `Certificate.notes`."""
        if not self.steps:
            return [(("steps",), self.sentences[0])]
        return [] if self.certificate is None else self.certificate.notes(models, max_overhead, prompts, **request)


def settings_of(policy: Policy, pair: str, *, record: bool = False) -> list[CalibratedSetting]:
    """Return the settings of a policy for a pair, the lowest temperature first.

    If a policy ships with those of other models only, its thresholds say nothing about these: those of one pair have
    lost 12 points of right answers on another. It then has a setting without steps.

    Args:
        policy: the policy as its file has it.
        pair: hash of the models, see `Pair.hash`.
        record: whether steps are recorded, so that settings without steps do not count.

    Raises:
        UsageError: a file of the user's folder is damaged.
    """
    shipped, own = data_folder("policies") / FOLDER / pair, user_folder() / pair
    found = {each.temperature: each for each in _matching(policy, [*shipped.glob("*.json"), *own.glob("*.json")])}
    settings = [found[temperature] for temperature in sorted(found)]
    if record:
        return [each for each in settings if each.steps]
    if settings or not _matching(policy, shipped.parent.glob("*/*.json")):
        return settings
    about: dict[str, Any] = {"policy_sha256": policy.settings_sha256, "pair": "these models", "temperature": 0}
    return [CalibratedSetting(**about, steps=False, sentences=[UNKNOWN])]


def proposing(policy: Policy, settings: Sequence[CalibratedSetting]) -> Policy:
    """Return the policy, without steps if no setting has any: models then need not support its judges."""
    return policy.without_steps() if settings and not any(each.steps for each in settings) else policy


def setting_at(settings: Sequence[CalibratedSetting], temperature: float) -> CalibratedSetting | None:
    """Return the setting for a temperature: the first one that reaches it, or else the last one."""
    return next((each for each in settings if temperature <= each.temperature), settings[-1] if settings else None)


def others_from(data_sha256: str, pair: str, policy: Policy, temperature: float) -> int:
    """Return how many of the user's certificates come from the same problems, without the one that this replaces."""
    found = [(file.parent.name, _read(file)) for file in user_folder().glob("*/*.json")]
    own = pair, policy.settings_sha256, temperature
    return sum(
        each.certificate is not None
        and each.certificate.data_sha256 == data_sha256
        and (folder, each.policy_sha256, each.temperature) != own
        for folder, each in found
    )


def user_folder() -> Path:
    """Return the folder of the user's calibrated settings. It may not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "stepspec" / FOLDER


def store(setting: CalibratedSetting, name: str, pair: str) -> Path:
    """Write a setting of the policy `name` into the user's folder, and return the file.

    Raises:
        StepSpecError: it cannot be written.
    """
    file = user_folder() / pair / f"{name}-t{setting.temperature:g}.json"
    write_text(file, setting.model_dump_json(indent=2, exclude_none=True) + "\n")
    return file


def _matching(policy: Policy, files: Iterable[Path]) -> list[CalibratedSetting]:
    settings, sha256 = [_read(file) for file in files], policy.settings_sha256
    judges = {judge.name for judge in policy.judges}
    return [each for each in settings if each.policy_sha256 == sha256 and each.thresholds.keys() <= judges]


def _read(file: Path) -> CalibratedSetting:
    try:
        return CalibratedSetting.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{file} is damaged, or of another version. Delete it, and calibrate again.") from error
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {reason_of(error)}.") from error
