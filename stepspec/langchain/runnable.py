"""StepSpecRunnable: the chat model as a plain Runnable that emits an event for each step.

A chat model can emit custom events only inside a parent run. This Runnable is its own run: `astream_events` shows
`stepspec.step.proposed`, `.judged` and `.committed` in a chain, in a graph, and on its own.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, adispatch_custom_event
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig, patch_config

from stepspec.langchain.chat import ChatStepSpec
from stepspec.langchain.errors import InvalidRequestError
from stepspec.langchain.messages import AnswerSteps, chunk_of, last_chunk
from stepspec.langchain.shared_models import loop_thread
from stepspec.loop.result import Done, Event
from stepspec.loop.step import StepCommitted, StepJudged, StepProposed

State = Mapping[str, Any]
"""The state of a graph, or another mapping with the key `messages`."""

Input = LanguageModelInput | State


class StepSpecRunnable(Runnable[Any, Any]):
    """A Runnable that takes a text, messages or a prompt and returns the answer as a message.

    As a node of a graph, it takes the state's `messages` and returns `{"messages": [answer]}`.
    """

    def __init__(self, chat: ChatStepSpec | None = None, **settings: Any) -> None:
        """
        Args:
            chat: the chat model. By default, one is created from the settings.
            settings: settings of `ChatStepSpec`, if no chat model is given.

        Raises:
            InvalidRequestError: both a chat model and settings are given.
            ValueError: a setting is unknown or out of range.
        """
        if chat is not None and settings:
            raise InvalidRequestError(f"Give either chat or settings, got chat and {', '.join(sorted(settings))}.")
        self.chat = chat or ChatStepSpec(**settings)
        self.name = "StepSpecRunnable"

    async def ainvoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Return the answer. `kwargs` are the settings of a call, as for `ChatStepSpec`."""
        message: AIMessageChunk | None = None
        async with aclosing(self.astream(_messages(input), config, **kwargs)) as chunks:
            async for chunk in chunks:
                message = chunk if message is None else message + chunk
        assert message is not None, "a request ends with its last chunk or an error"
        answer = AIMessage(**message.model_dump(exclude={"type", "tool_call_chunks", "chunk_position"}))
        return {"messages": [answer]} if isinstance(input, Mapping) else answer

    async def astream(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield the answer as message chunks."""

        async def single_input() -> AsyncIterator[Any]:
            yield input

        async def answer(
            inputs: AsyncIterator[Any], run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
        ) -> AsyncIterator[Any]:
            inner = patch_config(config, callbacks=run_manager.get_child())
            async for each in inputs:
                async with aclosing(self._chunks(_messages(each), inner, kwargs)) as chunks:
                    async for chunk in chunks:
                        yield chunk

        chunks = self._atransform_stream_with_config(single_input(), answer, config)
        async for chunk in chunks:
            yield chunk

    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Synchronous version of `ainvoke`."""
        return loop_thread().run(self.ainvoke(input, config, **kwargs))

    def stream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Synchronous version of `astream`."""
        return loop_thread().iterate(self.astream(input, config, **kwargs))

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run all inputs concurrently, so that the engines can batch them."""
        return loop_thread().run(self.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs))

    async def _chunks(
        self, messages: Sequence[BaseMessage], config: RunnableConfig, settings: Mapping[str, Any]
    ) -> AsyncGenerator[AIMessageChunk, None]:
        call, answer_steps = self.chat.make_call(None, settings), AnswerSteps()
        async with aclosing(call.events(messages, step_deltas=True)) as events:
            async for event in events:
                if (payload := _payload(event)) is not None:
                    await adispatch_custom_event(f"stepspec.{event.type}", payload, config=config)
                if isinstance(event, Done):
                    yield last_chunk(event.result, call.model)
                elif (chunk := chunk_of(event, answer_steps)) is not None:
                    yield chunk


def _payload(event: Event) -> dict[str, Any] | None:
    """Return the data of the custom event for a step event; None for other events."""
    if isinstance(event, StepCommitted):
        return event.step.to_dict()
    if isinstance(event, StepProposed | StepJudged):
        return {name: value for name, value in asdict(event).items() if name != "type"}
    return None


def _messages(input: Any) -> list[BaseMessage]:
    """Convert the input to messages."""
    if isinstance(input, str):
        return convert_to_messages([("user", input)])
    if isinstance(input, PromptValue):
        return input.to_messages()
    if isinstance(input, Mapping):
        if "messages" not in input:
            raise InvalidRequestError("The input is a mapping, which must have the key 'messages'.")
        return convert_to_messages(input["messages"])
    return convert_to_messages(input)
