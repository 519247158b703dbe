"""A certificate: for which models and requests a policy's thresholds are known to lose at most a given accuracy.

`stepspec calibrate` stores it with the thresholds, see `stepspec.loop.calibrated`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from stepspec.base.file_model import FileModel

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
CONTENT_HASHES = {"template_sha256": "chat template", "prompt_version": "prompt around the question"}

NEXT_STEP = "Run `stepspec calibrate`."

UNUSUAL = 0.02
"""Share of a benchmark's problems whose prompts are less probable than `Certificate.least_logprob`."""
FALSE_ALARMS = 0.05
"""Problems of a kind are said to be of another one in at most this share of the cases."""


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
    dtypes: Mapping[str, str]
    """Data type of each model, with its quantization, by role."""
    engines: Mapping[str, str]
    """What ran each model, by role."""
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    max_tokens: int = Field(ge=1)
    least_logprob: float | None = Field(default=None, le=0)
    """Lower bound of the mean log-probability of a prompt's tokens under the target, in nats, see
    `stepspec.api.scope.PromptReader`. Problems below it are another kind of problems."""
    speedup: float | None = None
    """The target's seconds over the policy's, for one request at a time."""
    speedup_interval: Annotated[tuple[float, float] | None, Strict(False)] = None
    hardware: str
    """Where the speedup was measured."""
    date: str

    def notes(
        self,
        models: Mapping[str, Mapping[str, str]],
        max_overhead: float | None = None,
        prompts: Sequence[float] = (),
        **request: float | str | None,
    ) -> list[tuple[Sequence[str], str]]:
        """Return a sentence if the certificate does not cover requests like this, and one about the policy's overhead.

        Each comes with the names of its settings. What the certificate does not say is not compared.

        Args:
            models: by `models`, `dtypes` and `engines`, the value of each model by role.
            max_overhead: the policy's.
            prompts: the mean log-probability of each prompt, see `least_logprob`.
            request: what is known of the requests: `temperature`, `top_p`, `max_tokens` (larger ones are covered),
                other settings of their sampling and limits that are not the default, and `benchmark`, `data_sha256`,
                `template_sha256` and `prompt_version`. None means not known.
        """
        if any(models["models"].get(role) != hash for role, hash in self.models.items()):
            return [(("models",), f"Thresholds were tuned with other models. {NEXT_STEP}")]
        found = {
            f"{role} {name}": f"a {role} {words} {certified}, not {models[name].get(role)}"
            for name, words, known in (("dtypes", "in", self.dtypes), ("engines", "on", self.engines))
            for role, certified in known.items()
            if models.get(name, {}).get(role, certified) != certified
        }
        if (
            request.pop("benchmark", None) not in (None, self.benchmark)
            and request.get("data_sha256") != self.data_sha256
        ):
            found["problems"] = f"other problems ({self.benchmark})"
        if self._is_another_kind(prompts):
            found["problems"] = f"another kind of problems ({self.benchmark})"
        request.pop("data_sha256", None)
        for name, value in request.items():
            certified = getattr(self, name, None)
            longer = name == "max_tokens" and isinstance(value, int) and value > self.max_tokens
            if value is None or value == certified or longer:
                continue
            if name in CONTENT_HASHES:
                found[name] = f"another {CONTENT_HASHES[name]}"
            elif certified is None:
                found[name] = f"no {name}"
            else:
                found[name] = f"{name.replace('_', ' ')} {certified:g}, not {value:g}"
        notes: list[tuple[Sequence[str], str]] = []
        if found:
            notes.append(([*found], f"Certified for {' and '.join(found.values())}. {NEXT_STEP}"))
        if max_overhead is not None:  # a calibration tests without a limit, which speculates on every step
            taken = f"With {max_overhead:g} the models take turns in other places, which depend on measured times."
            notes.append((("max_overhead",), f"Certified without max_overhead. {taken} To be covered, leave it out."))
        return notes

    def _is_another_kind(self, prompts: Sequence[float]) -> bool:
        """Whether more prompts are below the bound than problems of the same kind would have."""
        num_below = sum(1 for each in prompts if self.least_logprob is not None and each < self.least_logprob)
        rate, total = FALSE_ALARMS, len(prompts)
        as_many = (math.comb(total, k) * rate**k * (1 - rate) ** (total - k) for k in range(num_below, total + 1))
        return num_below > 0 and sum(as_many) <= FALSE_ALARMS


def least_logprob(prompts: Sequence[float]) -> float | None:
    """Return the bound for `Certificate.least_logprob` from the values of some problems; None for too few.

    A further problem of the same kind is below the k-th lowest of N values with a probability of k / (N + 1), because
    its rank among all is uniform.
    """
    place = max(1, math.floor(UNUSUAL * (len(prompts) + 1)))
    return sorted(prompts)[place - 1] if place <= FALSE_ALARMS * (len(prompts) + 1) else None


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
