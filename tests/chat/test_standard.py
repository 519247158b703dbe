"""The standard suites of langchain-tests, over scripted engines that follow the conversation."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pytest_socket import disable_socket, enable_socket

from stepspec.langchain import ChatStepSpec

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def without_network() -> Iterator[None]:
    """Disable sockets, except Unix sockets, which event loops use to wake themselves."""
    disable_socket(allow_unix_socket=True)
    yield
    enable_socket()


class Settings:
    """Settings of both suites."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatStepSpec

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "following:target", "draft": "following:draft"}

    @property
    def model_override_value(self) -> str:
        return "following:another"


class TestUnit(Settings, ChatModelUnitTests):
    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        address = "http://localhost:8000/v1"
        expected = {"base_url": address, "api_key": "secret"}
        return {"STEPSPEC_BASE_URL": address, "STEPSPEC_API_KEY": "secret"}, {}, expected


class TestIntegration(Settings, ChatModelIntegrationTests):
    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}

    @property
    def supported_usage_metadata_details(
        self,
    ) -> dict[Literal["invoke", "stream"], list[Any]]:
        kinds = ["reasoning_output", "cache_read_input"]
        return {"invoke": kinds, "stream": kinds}

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        return self._ask(stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self._ask(stream)

    def _ask(self, stream: bool) -> AIMessage:
        model = ChatStepSpec(**self.chat_model_params)
        if not stream:
            return model.invoke("How many?")
        chunks = list(model.stream("How many?"))
        total = chunks[0]
        for chunk in chunks[1:]:
            total = total + chunk
        return total


class TestByFunctionCalling(TestIntegration):
    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}


class TestStreamingInside(TestIntegration):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "streaming": True}


class TestBlocks(TestIntegration):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "output_version": "v1"}
