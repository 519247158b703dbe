"""ChatStepSpec: a LangChain chat model that speculates on reasoning.

model = ChatStepSpec(model="vllm:Qwen/Qwen3-32B", draft="vllm:Qwen/Qwen3-0.6B")   # in this process
model = ChatStepSpec(model="Qwen3-32B", base_url="http://localhost:8000/v1")      # served by `stepspec serve`
"""

import asyncio
import hashlib
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from importlib import import_module
from operator import itemgetter
from typing import Any, Literal

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseRunManager,
    CallbackManagerForLLMRun,
    adispatch_custom_event,
)
from langchain_core.decisions import BaseDecisionModel
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableBranch, RunnableConfig, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils import secret_from_env
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, Field, SecretStr, model_validator

from stepspec.api.models import Pair
from stepspec.api.session import StepSpec
from stepspec.base.keywords import check_known
from stepspec.base.strict_json import read_json
from stepspec.base.workers import off_the_loop
from stepspec.chat.tools import chosen, schema_of
from stepspec.engines.protocol import SAMPLING_NUMBERS
from stepspec.errors import EngineError, UsageError, unknown_name
from stepspec.langchain.errors import InvalidRequestError, LateError, as_langchain_errors
from stepspec.langchain.messages import PROVIDER, AnswerSteps, chunk_of, last_chunk, message_of, turns_of
from stepspec.langchain.shared_models import loaded_pair, loop_thread, shared_pair
from stepspec.loop.options import RequestOptions, check_patience
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.result import Done, Event
from stepspec.loop.step import Noted, StepCommitted

STEP_EVENT = "stepspec.step.committed"
"""Name of the custom event for a committed step. It is emitted if the model is called inside a run."""

WITHOUT_EFFECT = ("strict", "stream", "ls_structured_output_format")
"""Arguments of other providers that are accepted without effect: answers always follow their schema."""

RETRIES = 2
"""Retries of a call to a service."""

Schema = dict[str, Any] | type


class _Sessions(dict[Any, Any]):
    """Sessions, which copies and pickles of a chat model open anew."""

    def __deepcopy__(self, _: Any) -> "_Sessions":
        return _Sessions()

    def __reduce__(self) -> Any:
        return _Sessions, ()


class ChatStepSpec(BaseChatModel):
    """A chat model with a target and a draft, in this process or behind `stepspec serve`.

    In this process, engines load at the first call. Chat models with the same engines share them.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True, allow_inf_nan=False)

    model: str | None = Field(default=None, alias="model_name")
    """Spec string of the target, such as `vllm:Qwen/Qwen3-32B`. With `base_url`, the name of a model of the service.
    None uses the embedded pair, or the model that the service serves."""
    draft: str | None = None
    """Spec string of the draft model. Not allowed with `base_url`."""
    policy: str | Policy | None = None
    """A policy's name, file or value. With `base_url`, the name of a policy of the service. None uses `two-level`, or
    the service's default."""
    temperature: float | None = None
    """0 is greedy. None is the model's own default, as for the settings below; greedy if it has none."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    """Values to add to the logits of tokens, by token id."""
    seed: int | None = None
    """Random seed. None uses a new one for each call."""
    max_tokens: int | None = Field(default=None, alias="max_completion_tokens")
    """Limit for thinking and answer together. None allows as many as fit the context."""
    max_thinking_tokens: int | None = None
    """After this many tokens, the thinking ends and the target answers."""
    max_thinking_s: float | None = None
    """After this many seconds, the thinking ends and the target answers."""
    deadline_s: float | None = None
    """After this many seconds, the request ends and returns what exists. `timeout` raises an error instead."""
    enable_thinking: bool | None = None
    """False turns the thinking off."""
    reasoning_effort: str | None = None
    """How much to think, in the words of the model's chat template, such as `low`; `none` turns the thinking off."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat templates of both models."""
    draft_chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the draft's chat template."""
    logprobs: bool = False
    """Whether `response_metadata["logprobs"]` has the log-probabilities of all committed tokens."""
    top_logprobs: int = 0
    """Number of the most likely tokens to list at each place."""
    session_id: str | None = None
    """Id of the conversation, by which routers and pools of servers find the replica that has read it. The default is
    the `thread_id` of LangGraph."""
    cache_salt: str | None = None
    """Cached text is reused only by calls with the same salt."""
    timeout: float | None = Field(default=None, alias="request_timeout")
    """Seconds after which a call fails."""
    max_retries: int | None = None
    """Retries of a call that fails before its first event. None means 2 with `base_url`, else 0."""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """Strings that end the answer. They do not apply to the thinking."""
    streaming: bool = False
    """Whether `invoke` streams internally, for callbacks that receive tokens."""
    base_url: str | None = None
    """Address of a `stepspec serve`, such as `http://localhost:8000/v1`. The default is the environment variable
    STEPSPEC_BASE_URL, unless `draft`, `judges`, `pair` or a spec string as `model` is given."""
    api_key: SecretStr | None = Field(default_factory=secret_from_env("STEPSPEC_API_KEY", default=None))
    judges: dict[str, str | BaseDecisionModel] | None = None
    """Judge models by name, as in `stepspec.load_pair`. Not allowed with `base_url` or a loaded pair, which has its
    own."""
    pair: Any = Field(default=None, exclude=True)
    """A loaded `stepspec.Pair`, or the name of a pair, instead of `model` and `draft`."""

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping):
            fields = cls.model_fields
            aliases = {field.alias for field in fields.values() if field.alias}
            try:
                check_known(settings, {*fields, *aliases}, "setting")
            except UsageError as error:
                raise ValueError(str(error)) from None
        return settings

    @model_validator(mode="after")
    def _check(self) -> "ChatStepSpec":
        has_models = bool(self.judges) or self.draft is not None or self.pair is not None
        if self.base_url is None and not has_models and ":" not in (self.model or ""):
            self.base_url = os.environ.get("STEPSPEC_BASE_URL") or None
        if self.base_url is not None and has_models:
            raise ValueError("With base_url, the service has its own models; leave out draft, judges and pair.")
        if self.judges and isinstance(self.pair, Pair):
            raise ValueError("judges belong to the pair: pass them to load_pair.")
        if self.base_url is not None and isinstance(self.policy, Policy):
            raise ValueError("With base_url, policy must be the name of a policy of the service.")
        if not isinstance(self.pair, Pair | str | None):
            raise ValueError("pair must be the name of a pair or a stepspec.Pair; stepspec.load_pair loads one.")
        if self.pair is not None and (self.model is not None or self.draft is not None):
            raise ValueError("Give either a pair, or model and draft.")
        return self

    # The interface of BaseChatModel.

    @property
    def _llm_type(self) -> str:
        return "stepspec"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        policy = _hash_of(self.policy) if isinstance(self.policy, Policy) else self.policy
        params = {
            "model": self.result_model(self.model),
            "draft": self.draft,
            "policy": policy,
            "base_url": self.base_url,
        }
        params |= {"pair": id(self.pair) if isinstance(self.pair, Pair) else self.pair} if self.pair else {}
        params |= {"judges": self.judges} if self.judges else {}
        params["ends"] = self.stop  # LangChain would overwrite the key "stop" with the value of the call
        changing = (name for name in OPTIONS if name not in ("stop", "session_id", "cache_salt"))
        return params | {name: getattr(self, name) for name in (*SAMPLING_NUMBERS, "logit_bias", *changing)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider=PROVIDER,
            ls_model_name=self.result_model(kwargs.get("model", self.model)),
            ls_model_type="chat",
            ls_temperature=kwargs.get("temperature", self.temperature),
        )
        if most := kwargs.get("max_tokens", self.max_tokens):
            params["ls_max_tokens"] = most
        if ends := stop or self.stop:
            params["ls_stop"] = ends
        return params

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            text_inputs=True,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
            reasoning_output=True,
        )
        pair = self.pair if isinstance(self.pair, Pair) else loaded_pair(self.model, self.draft, self.pair)
        if pair is not None:
            profile["max_input_tokens"] = profile["max_output_tokens"] = pair.target.max_context
        return profile

    def get_token_ids(self, text: str) -> list[int]:
        """Return the target's token ids of a text. Not supported with `base_url`."""
        if self.base_url is not None:
            raise InvalidRequestError("With base_url, token ids are not supported. Count tokens with usage_metadata.")
        with as_langchain_errors():
            loaded = self.pair if isinstance(self.pair, Pair) else shared_pair(self.model, self.draft, self.pair)
            return loaded.target.tokenizer.encode_text(text)

    def open_session(
        self, policy: str | Policy, model: str | None, draft: str | None, pair: Pair | str | None
    ) -> StepSpec:
        """Return a session in this process. Models that are not loaded yet are loaded, which may take minutes."""
        if not isinstance(pair, Pair):
            wanted = policy if isinstance(policy, Policy) else load_policy(policy)[0]
            pair = shared_pair(model, draft, pair, self.judges, wanted.judge_models)
        return StepSpec(policy=policy, pair=pair)

    def result_model(self, model: str | None) -> str:
        """Return the model's name in results."""
        if model is not None:
            return model
        if isinstance(self.pair, Pair):
            return self.pair.target.name
        return self.pair or ("embedded" if self.base_url is None else "served")

    # Calls. Asynchronous calls run in the caller's event loop, synchronous calls in one shared thread.

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self.make_call(stop, self._in_thread(run_manager, kwargs))
        answer_steps = AnswerSteps()
        async with aclosing(call.events(messages)) as events:
            async for event in events:
                answer_steps.of(event)
                if isinstance(event, Done):
                    message = message_of(event.result, call.model, answer_steps)
                    return ChatResult(generations=[ChatGeneration(message=message)])
                await call.emit(event)
        raise AssertionError("a request ends with Done or an error")

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        call = self.make_call(stop, self._in_thread(run_manager, kwargs))
        answer_steps = AnswerSteps()
        async with aclosing(call.events(messages, step_deltas=True)) as events:
            async for event in events:
                await call.emit(event)
                if isinstance(event, Done):
                    chunk: AIMessageChunk | None = last_chunk(event.result, call.model)
                else:
                    chunk = chunk_of(event, answer_steps)
                if chunk is not None:
                    yield ChatGenerationChunk(message=chunk)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return loop_thread().run(self._agenerate(messages, stop, **self._in_thread(run_manager, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return loop_thread().iterate(self._astream(messages, stop, **self._in_thread(run_manager, kwargs)))

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Run all inputs concurrently. The number of threads is no limit."""
        work = self.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        return loop_thread().run(work)

    async def stepspec_events(
        self, messages: Sequence[BaseMessage], stop: list[str] | None = None, **kwargs: Any
    ) -> AsyncGenerator[Event, None]:
        """Yield the typed events of a call, including proposed and judged steps, see `stepspec.StepSpec.stream`."""
        async with aclosing(self.make_call(stop, kwargs).events(messages)) as events:
            async for event in events:
                yield event

    def _in_thread(self, manager: BaseRunManager | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a call, with the thread of LangGraph that it belongs to as its conversation."""
        thread = None if manager is None else (manager.metadata or {}).get("thread_id")
        if thread is None or self.session_id is not None:
            return dict(kwargs)
        return {"session_id": str(thread), **kwargs}

    def make_call(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> "_ChatCall":
        """Return a call with these settings. It runs when its events are read.

        Raises:
            langchain_core.exceptions.ModelError: a setting is unknown or not supported.
        """
        overrides = {name: value for name, value in kwargs.items() if name not in WITHOUT_EFFECT}
        with as_langchain_errors():
            check_known(overrides, PER_CALL, "setting of a call")
        if self.base_url is not None and overrides.get("draft") is not None:
            raise InvalidRequestError("With base_url, the service has its own draft; leave out draft.")
        return _ChatCall(self, {"stop": stop, **overrides} if stop is not None else overrides)

    @cached_property
    def sessions(self) -> dict[Any, Any]:
        """The sessions of this chat model, by model, draft, policy and connection settings."""
        return _Sessions()

    # Tools and structured output.

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that it may call.

        Args:
            tools: tools in any format that LangChain can convert.
            tool_choice: "auto" (or None, False), "none", "any" or "required" (or True), a tool's name, or a choice in
                OpenAI's format.
            kwargs: further settings for each call.

        Raises:
            InvalidRequestError: `tool_choice` is not one of the tools.
        """
        described = [convert_to_openai_tool(tool) for tool in tools]
        names = [tool["function"]["name"] for tool in described]
        choice = _tool_choice(tool_choice)
        if choice not in ("auto", "none", "required", *names):
            raise InvalidRequestError(unknown_name("tool", choice, names))
        return self.bind(tools=described, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return the model with answers that follow a schema. The schema constrains the answer token by token.

        An answer that a limit cut off raises LangChain's `OutputParserException`.

        Args:
            schema: a pydantic class, a TypedDict class, or a JSON schema.
            method: `json_schema` answers in JSON of this schema, `json_mode` in any JSON. `function_calling` passes the
                schema as a tool that the model must call.
            include_raw: whether the result is a dictionary with `raw`, `parsed` and `parsing_error`.
            strict: has no effect, because answers always follow the schema.
            tools: tools that the model may call instead; the result is then None. Not with `function_calling`.
            kwargs: further settings for each call.

        Raises:
            InvalidRequestError: the arguments contradict each other.
        """
        if schema is None and method != "json_mode":
            raise InvalidRequestError(f"The method {method!r} needs a schema.")
        form = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        parser: Any
        if method == "function_calling":
            if tools:
                raise InvalidRequestError("With function_calling the schema is the only tool; leave out tools.")
            assert schema is not None
            name = convert_to_openai_tool(schema)["function"]["name"]
            model = self.bind_tools(
                [schema], tool_choice=name, parallel_tool_calls=False, ls_structured_output_format=form, **kwargs
            )
            if isinstance(schema, type) and is_basemodel_subclass(schema):
                parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
            else:
                parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        elif method in ("json_schema", "json_mode"):
            settings = {"response_format": _response_format(schema, method), "ls_structured_output_format": form}
            if tools:
                model = self.bind_tools(tools, **settings, **kwargs)
            else:
                model = self.bind(**settings, **kwargs)
            if isinstance(schema, type) and is_basemodel_subclass(schema):
                parser = PydanticOutputParser(pydantic_object=schema)
            else:
                parser = JsonOutputParser()
        else:
            methods = ("json_schema", "function_calling", "json_mode")
            raise InvalidRequestError(unknown_name("method", method, methods))
        if tools:
            parser = RunnableBranch((_calls, lambda _: None), parser)
        parser = RunnablePassthrough(partial(_check_whole, method)) | parser
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


OPTIONS = tuple(name for name in RequestOptions.model_fields if name in ChatStepSpec.model_fields and name != "policy")
"""Settings that are options of a request by the same name."""
PER_CALL = (
    *("model", "draft", "policy", "timeout", "max_retries", "logit_bias", *SAMPLING_NUMBERS, *OPTIONS),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format"),
)
"""Settings that a call can override."""


class _ChatCall:
    """One call: the model's settings and the call's overrides."""

    def __init__(self, chat: ChatStepSpec, overrides: Mapping[str, Any]) -> None:
        self._chat = chat
        self._overrides = overrides
        named = self._setting("model")
        self.model: str | None = named if chat.base_url is not None else chat.result_model(named)
        self.policy: str | Policy | None = self._setting("policy")
        self._in_a_run = True

    async def emit(self, event: Event) -> None:
        """Emit a committed step to the callbacks of the run, if the call is part of one."""
        if isinstance(event, StepCommitted) and not event.in_answer and self._in_a_run:
            try:
                await adispatch_custom_event(STEP_EVENT, event.step.to_dict())
            except RuntimeError:  # without a parent run, custom events cannot be emitted
                self._in_a_run = False

    def _setting(self, name: str) -> Any:
        override = self._overrides.get(name)
        return getattr(self._chat, name, None) if override is None else override

    async def events(
        self, messages: Sequence[BaseMessage], *, step_deltas: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Run the call and yield its events, with `StepDelta` if `step_deltas` is set.

        Raises:
            langchain_core.exceptions.ModelError: the call is invalid or has failed.
        """
        timeout = self._setting("timeout")
        with as_langchain_errors():
            check_patience(timeout, max_retries=self._setting("max_retries"))
            turns, options = await off_the_loop(messages, lambda: turns_of(messages)), self._options()
            options = options.model_copy(update={"step_deltas": step_deltas})
            spec = await self._session()
            tries = 1 + (self._setting("max_retries") or 0) if self._chat.base_url is None else 1
            end = None if timeout is None else asyncio.get_running_loop().time() + timeout
            async with aclosing(_retried(spec, turns, options, tries)) as events:
                if end is None:  # a timer for each event would dominate the cost of this loop
                    async for event in events:
                        yield event
                    return
                while True:
                    limit = asyncio.timeout_at(end)
                    try:
                        async with limit:
                            event = await anext(events, None)
                    except TimeoutError as error:
                        if limit.expired():
                            raise LateError(f"The call exceeded its timeout of {timeout} s.") from error
                        raise
                    if event is None:
                        return
                    yield event

    async def _session(self) -> Any:
        """Return the session for this call: with engines in this process, or with the service."""
        chat = self._chat
        model, draft = self._setting("model"), self._setting("draft")
        known = id(self.policy) if isinstance(self.policy, Policy) else self.policy
        retries, timeout = self._setting("max_retries"), self._setting("timeout")
        retries = RETRIES if retries is None else retries
        connection = (chat.api_key, retries, timeout) if chat.base_url is not None else None
        pair = chat.pair if model == chat.model and draft == chat.draft else None
        given = sorted((chat.judges or {}).items())
        judges = tuple((name, spec if isinstance(spec, str) else id(spec)) for name, spec in given)
        key = (chat.base_url, model, draft, pair if isinstance(pair, str) else id(pair), judges, known, connection)
        if key not in chat.sessions:
            if chat.base_url is not None:
                client = import_module("stepspec.client")
                secret = chat.api_key.get_secret_value() if chat.api_key else None
                settings = {"model": model, "policy": self.policy, "api_key": secret}
                chat.sessions[key] = client.RemoteStepSpec(chat.base_url, **settings, retries=retries, timeout=timeout)
            else:
                policy = self.policy or "two-level"
                chat.sessions[key] = await asyncio.to_thread(chat.open_session, policy, model, draft, pair)
        return chat.sessions[key]

    def _options(self) -> RequestOptions:
        seed = self._setting("seed")
        sampling = {name: value for name in SAMPLING_NUMBERS if (value := self._setting(name)) is not None}
        sampling["seed"] = secrets.randbits(31) if seed is None else seed
        bias: Mapping[int, float] = self._setting("logit_bias") or {}
        sampling["logit_bias"] = tuple((int(id), amount) for id, amount in bias.items())
        parallel = self._overrides.get("parallel_tool_calls")
        return RequestOptions(
            sampling=sampling,
            tools=self._overrides.get("tools") or (),
            tool_choice=_tool_choice(self._overrides.get("tool_choice")),
            parallel_tool_calls=True if parallel is None else parallel,
            json_schema=_schema_of(self._overrides.get("response_format")),
            **{name: value for name in OPTIONS if (value := self._setting(name)) is not None},
        )


async def _retried(
    spec: Any, turns: Sequence[Mapping[str, Any]], options: RequestOptions, tries: int
) -> AsyncGenerator[Event, None]:
    """Yield the events of a request. Retry the request if it fails before its first event and its deadline."""
    end = math.inf if options.deadline_s is None else time.perf_counter() + options.deadline_s
    for retries_left in reversed(range(tries)):
        begun = False
        try:
            async with aclosing(spec.stream(turns, options)) as events:
                async for event in events:
                    begun |= not isinstance(event, Noted)
                    yield event
            return
        except EngineError:
            left_s = end - time.perf_counter()
            if begun or not retries_left or left_s <= 0:
                raise
            if options.deadline_s is not None:
                options = RequestOptions.of(options, {"deadline_s": left_s})


def _calls(message: AIMessage) -> bool:
    """Whether a message contains tool calls."""
    return bool(message.tool_calls)


def _check_whole(method: str, message: Any) -> None:
    """Check that structured output is complete, because LangChain's parsers complete what is missing.

    Raises:
        OutputParserException: it is not.
    """
    problem = None
    if message.response_metadata.get("finish_reason") == "length":
        problem = "it was cut off. Raise max_tokens, and deadline_s if it is set"
    elif method == "function_calling":
        problem = None if message.tool_calls else "it does not call the schema's tool"
    elif not message.tool_calls:
        try:
            read_json(message.text)
        except ValueError as error:
            problem = f"{error}"
    if problem is not None:
        raise OutputParserException(f"The answer is not complete JSON: {problem}.", llm_output=message.text)


def _hash_of(policy: Policy) -> str:
    """Return a hash that identifies a policy without a name."""
    return hashlib.sha256(policy.model_dump_json().encode()).hexdigest()[:16]


def _tool_choice(choice: str | Mapping[str, Any] | bool | None) -> str:
    """Convert LangChain's `tool_choice` to the `choice` of a `Toolbox`."""
    if choice is True or choice == "any":
        return "required"
    with as_langchain_errors():
        return chosen(choice or None)


def _response_format(schema: Schema | None, method: str) -> dict[str, Any]:
    """Return a schema as a `response_format` of OpenAI's API."""
    if method == "json_mode" or schema is None:
        return {"type": "json_object"}
    form = convert_to_json_schema(schema)
    return {"type": "json_schema", "json_schema": {"name": form.get("title", "answer"), "schema": form, "strict": True}}


def _schema_of(response_format: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema of a `response_format`, which may also be a class."""
    return convert_to_json_schema(response_format) if isinstance(response_format, type) else schema_of(response_format)
