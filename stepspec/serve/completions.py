"""OpenAI's completions: a prompt without a chat template, and the text that follows it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field

from stepspec.chat.events import AnswerDelta
from stepspec.chat.prompts import RawPrompt
from stepspec.engines.thinking import ThinkingTags
from stepspec.errors import StepSpecError
from stepspec.loop.result import Done, Event, Result
from stepspec.loop.step import Noted, StepCommitted, StepDelta
from stepspec.serve.errors import RefusedError, error_body
from stepspec.serve.fields import Items, TextRequest
from stepspec.serve.figures import metrics_of, usage_of
from stepspec.serve.refused import COMPLETIONS

MAX_TEXTS = 64
"""Most texts of a request: its prompts, times `n`."""


class CompletionRequest(TextRequest):
    """The body of `/v1/completions`.

    The text goes on behind the prompt. If the prompt leaves the thinking open, the thinking is part of the text.
    Unknown fields are ignored. The response lists them in `metrics.ignored_fields`.
    """

    model_config = ConfigDict(json_schema_extra=COMPLETIONS.document)
    refusals = COMPLETIONS

    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(
        description=f"A text, in which special tokens are recognized, or token ids; or a list of at most {MAX_TEXTS}."
    )
    add_special_tokens: bool | None = Field(
        default=True, description="Whether a text gets the tokens that begin every text of the model."
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="Number of most likely tokens to list at each token, at most 20."
    )

    def questions(self) -> list[RawPrompt]:
        """Return the prompts.

        Raises:
            RefusedError: there are none, or too many.
        """
        given: Any = self.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts = given if several else [given]
        if not all(prompts):
            raise RefusedError("prompt", "A prompt must have at least one token.")
        if (count := len(prompts) * self.num_answers) > MAX_TEXTS:
            raise RefusedError("prompt", f"The prompts times n may be at most {MAX_TEXTS} texts, got {count}.")
        return [RawPrompt(prompt, self.add_special_tokens is not False) for prompt in prompts]

    def own_options(self) -> Mapping[str, Any]:
        """Return the options of this route's own fields."""
        return {"logprobs": self.logprobs is not None, "top_logprobs": self.logprobs or 0}


class CompletionAnswer:
    """Builds the response to one completion request."""

    named_events = False

    def __init__(
        self,
        model: str,
        policy: str,
        request: CompletionRequest,
        request_id: str,
        thinking: Sequence[ThinkingTags | None],
    ) -> None:
        """`thinking`: for each answer, how the thinking is marked that its prompt leaves open."""
        self._request, self._policy, self._thinking = request, policy, thinking
        self._texts = [_Text(tags) for tags in thinking]
        self._head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model

    def begin(self) -> list[dict[str, Any]]:
        """Return the chunks before the first event."""
        return []

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Return the chunks of an event."""
        if isinstance(event, Noted):
            return [{**self._chunk(index, ""), "stepspec": {"note": event.text}}]
        text = self._texts[index].of(event)
        if isinstance(event, Done):
            return [self._chunk(index, text, event.result.finish_reason, _logprobs(event.result))]
        return [self._chunk(index, text)] if text else []

    def end(self, results: Sequence[Result]) -> list[dict[str, Any]]:
        """Return the chunks after the last event."""
        if not self._request.includes_usage:
            return []
        return [{**self._head, "choices": [], **self._costs(results)}]

    def failed(self, error: StepSpecError) -> list[dict[str, Any]]:
        """Return the chunks for an error in the middle of a stream."""
        return [error_body(error)]

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the complete response."""
        choices = [
            _choice(index, _whole(self._thinking[index], result), result.finish_reason, _logprobs(result))
            for index, result in enumerate(results)
        ]
        return {**self._head, "choices": choices, **self._costs(results)}

    def _costs(self, results: Sequence[Result]) -> dict[str, Any]:
        metrics = metrics_of(results, self._policy, self._request.ignored)
        return {"usage": usage_of(results, self._request.num_answers), "metrics": metrics}

    def _chunk(self, index: int, text: str, reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return {**self._head, "choices": [_choice(index, text, reason, logprobs)]}


class _Text:
    """The text of an answer, in which a tag stands between thinking and answer."""

    def __init__(self, tags: ThinkingTags | None) -> None:
        """`tags`: how the thinking is marked that the prompt leaves open; None if it opens none."""
        self._tags = tags
        self._thinks = tags is not None

    def of(self, event: Event) -> str:
        """Return the text of an event."""
        if isinstance(event, StepDelta | StepCommitted) and self._thinks:
            return event.text if isinstance(event, StepDelta) else event.rest
        text = event.text if isinstance(event, AnswerDelta) else ""
        if self._thinks and (text or (isinstance(event, Done) and event.result.finish_reason == "stop")):
            assert self._tags is not None
            self._thinks = False
            return self._tags.format.ending.lstrip("\n") + text  # a line break before it belongs to the thinking
        return text


def _whole(tags: ThinkingTags | None, result: Result) -> str:
    events: list[Event] = [*map(StepCommitted, result.steps), AnswerDelta(result.answer), Done(result)]
    text = _Text(tags)
    return "".join(map(text.of, events))


def _choice(index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(result: Result) -> dict[str, Any] | None:
    """Return log-probabilities in the format of completions."""
    if result.logprobs is None:
        return None
    offsets, offset = list[int](), 0
    for each in result.logprobs:
        offsets.append(offset)
        offset += len(each.token)
    return {
        "tokens": [each.token for each in result.logprobs],
        "token_logprobs": [each.logprob for each in result.logprobs],
        "top_logprobs": [dict(each.top) for each in result.logprobs],
        "text_offset": offsets,
    }
