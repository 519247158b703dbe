"""A certificate in a policy file: for which models and requests the policy is known to lose at most a given accuracy.

`stepspec calibrate` writes it. Its hash covers the policy's settings and the certificate itself, so that neither can be
changed without the other.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Strict

from stepspec.base.file_model import FileModel, parse_toml

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
HASH_VERSION = 1
"""Changes if a default of a policy's settings does, since defaults are not in the hash."""
CONTENT_HASHES = {"template_sha256": "chat template", "prompt_version": "prompt around the question"}
NOT_COVERED = frozenset({"summary", "paper", "certificate", "temperatures", "fallbacks"})
"""Keys of a policy that say nothing about what it does, or belong to other temperatures or engines."""
SPEED_ONLY = {"score": frozenset({"depth", "draft_answer", "max_overhead"})}
"""Keys of tables that say when a text is written, and not which text is accepted. A certificate has the last one."""


NEXT_STEP = "Run `stepspec calibrate`."


class Certificate(FileModel):
    """What was certified: in how many of the cases a policy loses more than `max_loss`, at most 1 - `confidence`."""

    measure: Literal["accuracy", "agreement"]
    """`accuracy`: the share of right answers lost. `agreement`: the share of answers that agree with the target's own,
    beyond what the target disagrees with itself."""
    max_loss: float = Field(gt=0, lt=1)
    """The largest loss against the target that is compatible with the certificate, as a share of the problems."""
    loss_upper: float
    """The upper bound of the loss that was found."""
    confidence: float = Field(gt=0.5, lt=1)
    """Probability that a procedure like this one certifies no policy that loses more."""
    num_problems: int = Field(ge=1)
    """Problems that the bound was computed from."""
    benchmark: str
    """Name of the benchmark, or of the file of prompts."""
    data_sha256: Sha256
    """Hash of the problems."""
    prompt_version: str
    """Hash of the prompt around a question."""
    template_sha256: Sha256
    """Hash of the target's chat template, as rendered for a question."""
    models: Mapping[str, str]
    """Hash of the weights of `target`, `draft` and the judge models, or their names if the weights are not local."""
    pair: str | None = None
    """The models in words. None in certificates from before this field existed, like the next three."""
    dtypes: Mapping[str, str] | None = None
    """Data type of each model, with its quantization, by role."""
    engines: Mapping[str, str] | None = None
    """What ran each model, by role."""
    max_overhead: float | Literal["none"] | None = None
    """The policy's limit in the test. `stepspec calibrate` tests without one, which speculates on every step."""
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    max_tokens: int = Field(ge=1)
    speedup: float | None = None
    """The target's seconds over the policy's, for one request at a time."""
    speedup_interval: Annotated[tuple[float, float] | None, Strict(False)] = None
    hardware: str
    """Where the speedup was measured."""
    date: str
    sha256: Sha256
    """Hash of everything above and of the policy's settings."""

    def notes(
        self, models: Mapping[str, Mapping[str, str]], max_overhead: float | None = None, **request: float | str | None
    ) -> list[tuple[Sequence[str], str]]:
        """Return a sentence if the certificate does not cover requests like this, and one about the policy's overhead.

        Each comes with the names of its settings. What the certificate does not say is not compared.

        Args:
            models: by `models`, `dtypes` and `engines`, the value of each model by role.
            max_overhead: the policy's.
            request: what is known of the requests: `temperature`, `top_p`, `max_tokens` (larger ones are covered),
                other settings of their sampling and limits that are not the default, and `benchmark`, `data_sha256`,
                `template_sha256` and `prompt_version`. None means not known.
        """
        if any(models["models"].get(role) != hash for role, hash in self.models.items()):
            return [(("models",), f"Thresholds were tuned for {self.pair or 'other models'}. {NEXT_STEP}")]
        found = {
            f"{role} {name}": f"a {role} {words} {certified}, not {models[name].get(role)}"
            for name, words, known in (("dtypes", "in", self.dtypes), ("engines", "on", self.engines))
            for role, certified in (known or {}).items()
            if models.get(name, {}).get(role, certified) != certified
        }
        if (
            request.pop("benchmark", None) not in (None, self.benchmark)
            and request.get("data_sha256") != self.data_sha256
        ):
            found["benchmark"] = f"other problems ({self.benchmark})"
        request.pop("data_sha256", None)
        for name, value in request.items():
            certified = getattr(self, name, None)
            longer = name == "max_tokens" and isinstance(value, int) and value > self.max_tokens
            if value is None or value == certified or longer:
                continue
            words = name.replace("_", " ")
            if name in CONTENT_HASHES:
                found[name] = f"another {CONTENT_HASHES[name]}"
            else:
                found[name] = f"no {words}" if certified is None else f"{words} {certified:g}, not {value:g}"
        notes: list[tuple[Sequence[str], str]] = []
        if found:
            notes.append(([*found], f"Certified for {' and '.join(found.values())}. {NEXT_STEP}"))
        if self.max_overhead is not None and max_overhead is not None and self.max_overhead != max_overhead:
            tested = (
                "without max_overhead" if self.max_overhead == "none" else f"with max_overhead {self.max_overhead:g}"
            )
            taken = f"With {max_overhead:g} the models take turns in other places."
            notes.append((("max_overhead",), f"Certified {tested}. {taken}"))
        return notes


class _Certified(BaseModel):
    certificate: Certificate | None = None


class _AtMost(_Certified):
    at_most: float


class _Score(BaseModel):
    max_overhead: float | None = None


class CertifiedPolicy(_Certified):
    """The certificates in a policy file of any version. Its other keys are not read, except for `max_overhead`."""

    temperatures: list[_AtMost] = []
    score: _Score = _Score()

    @classmethod
    def read(cls, text: str) -> "CertifiedPolicy":
        """Read the text of a policy file, which may come from elsewhere.

        Raises:
            ValueError: it is not a policy file.
            RecursionError: it is nested too deeply.
        """
        # Texts without a certificate need not be policy files of this version.
        return cls.model_validate(parse_toml(text)) if "certificate]" in text else cls()

    def at(self, temperature: float) -> Certificate | None:
        """Return the certificate for a temperature; None without one."""
        return next((each for each in self.temperatures if temperature <= each.at_most), self).certificate


def certificate_hash(settings: Mapping[str, Any], certificate: Mapping[str, Any]) -> str:
    """Return the hash of a certificate.

    Args:
        settings: the policy as plain values, without defaults, so that a certificate outlives new settings.
        certificate: the fields of the certificate as plain values; `sha256` is not used.
    """
    kept = {key: value for key, value in settings.items() if key not in NOT_COVERED}
    for name, keys in SPEED_ONLY.items():
        table = {key: value for key, value in kept.pop(name, {}).items() if key not in keys}
        kept |= {name: table} if table else {}
    covered = {
        "version": HASH_VERSION,
        "settings": kept,
        "certificate": {key: value for key, value in certificate.items() if key != "sha256" and value is not None},
    }
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


def by_role(described: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return what certificates compare of models: `models`, `dtypes` and `engines` by role, as far as they are known.

    Args:
        described: the description of each model by role, see `Engine.describe`.
    """
    devices = {role: str(each["device"]) for role, each in described.items() if each.get("device")}
    return {
        "models": {role: str(each.get("weights") or each["name"]) for role, each in described.items()},
        "dtypes": {role: str(each["dtype"]) for role, each in described.items() if each.get("dtype")},
        "engines": {role: re.split(" on | at ", each)[0] if " " in each else "torch" for role, each in devices.items()},
    }
