"""Requests for the tokens of a prompt or of a conversation, with vLLM's fields."""

from typing import Any

from pydantic import ConfigDict, Field

from stepspec.chat.prompts import RawPrompt
from stepspec.loop.options import RequestOptions
from stepspec.serve.errors import RefusedError
from stepspec.serve.fields import Body, Items
from stepspec.serve.refused import TOKENIZE
from stepspec.serve.requests import TURN


class TokenizeRequest(Body):
    """The body of `/tokenize`: a prompt, or a conversation with its tools."""

    model_config = ConfigDict(json_schema_extra=TOKENIZE.document)
    refusals = TOKENIZE

    model: str | None = Field(default=None, description="Name of a served model; by default the first one.")
    prompt: str | None = Field(default=None, description="A text, in which special tokens are recognized.")
    add_special_tokens: bool | None = Field(
        default=True, description="Whether a prompt gets the tokens that begin every text of the model."
    )
    messages: Items[dict[str, Any]] | None = Field(
        default=None, description="A conversation, in place of a prompt.", json_schema_extra={"items": TURN}
    )
    tools: Items[dict[str, Any]] | None = Field(default=None, description="Tools of the conversation.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")
    return_token_strs: bool | None = Field(default=False, description="Whether to return the text of each token.")

    def question(self) -> RawPrompt | list[dict[str, Any]]:
        """Return the prompt or the conversation.

        Raises:
            RefusedError: there is none, or both.
        """
        if (self.prompt is None) == (self.messages is None):
            raise RefusedError("prompt", "Send either prompt or messages.")
        if self.prompt is not None:
            return RawPrompt(self.prompt, self.add_special_tokens is not False)
        return self.messages or []

    def options(self) -> RequestOptions:
        """Convert the request to options of the Python API."""
        return RequestOptions(tools=self.tools or [], chat_template_kwargs=self.chat_template_kwargs or {})
