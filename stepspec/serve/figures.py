"""Usage and metrics of a response, in the formats of OpenAI and vLLM."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stepspec.loop.result import Result


def usage_of(results: Sequence[Result], num_answers: int = 1) -> dict[str, Any]:
    """Return token usage in OpenAI's format.

    Args:
        results: the results of all answers, those to one prompt next to each other.
        num_answers: answers to each prompt, which counts once.
    """
    prompts = results[::num_answers]
    prompt_tokens = sum(each.num_prompt_tokens for each in prompts)
    completion_tokens = sum(each.counts.committed for each in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.usage.cached_tokens for each in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.usage.reasoning_tokens for each in results)},
    }


def metrics_of(results: Sequence[Result], policy: str, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of one answer, and the request's ignored fields.

    With several answers, the metrics are null, as in vLLM.
    """
    if len(results) != 1:
        return {**dict.fromkeys(NAMES), "ignored_fields": list(ignored)}
    (result,) = results
    counts, times = result.counts, result.times
    first = times.first_token
    rest = times.wall - first if first is not None and counts.committed > 1 else None
    return {
        "time_to_first_token_ms": None if first is None else first * 1000,
        "generation_time_ms": (times.wall - times.queue) * 1000,
        "queue_time_ms": times.queue * 1000,
        "mean_itl_ms": None if rest is None else rest * 1000 / (counts.committed - 1),
        "tokens_per_second": counts.committed / times.wall if times.wall else None,
        "speculative_decoding": _token_level(result),
        "stepspec": _step_level(result, policy),
        "ignored_fields": list(ignored),
    }


NAMES = (
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
    "speculative_decoding",
    "stepspec",
)
"""Metrics of one answer."""


def _token_level(result: Result) -> dict[str, Any]:
    """Return metrics of token-level speculation with vLLM's names. Null is what the target's engine does not report."""
    counts, rounds = result.counts, result.token_rounds
    return {
        "mean_acceptance_length": rounds and rounds.mean_acceptance_length,
        "draft_acceptance_rate": counts.token_accepted / counts.token_drafted if counts.token_drafted else None,
        "acceptance_histogram": rounds and rounds.histogram,
        "num_spec_steps": rounds and rounds.num_rounds,
        "num_accepted_draft_tokens": counts.token_accepted,
        "num_draft_tokens": counts.token_drafted,
    }


def _step_level(result: Result, policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "counts": asdict(result.counts),
        "wasted_tokens": result.counts.wasted,
        "times": asdict(result.times),
        "thinks": result.thinks,
        "limit": result.limit,
        "stop_string": result.stop_string,
        "not_proposed": result.not_proposed,
        "token_level_exact": result.token_level_exact,
        "note": result.note,
        "uncovered": result.uncovered,
    }
