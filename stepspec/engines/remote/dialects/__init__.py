"""How servers score a continuation, one module for each dialect."""

from collections.abc import Mapping

from stepspec.engines.remote.dialects.base import Scorer
from stepspec.engines.remote.dialects.generate import GenerateScorer
from stepspec.engines.remote.dialects.inference import InferenceScorer
from stepspec.engines.remote.dialects.prompt_logprobs import PromptLogprobsScorer

SCORERS: Mapping[str, type[Scorer]] = {
    "inference": InferenceScorer,
    "prompt_logprobs": PromptLogprobsScorer,
    "generate": GenerateScorer,
}
"""By name, in the order in which they are tried."""
