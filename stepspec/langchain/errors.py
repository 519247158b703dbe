"""Exceptions that are both LangChain's and stepspec's, so that code can catch either."""

from collections.abc import Generator
from contextlib import contextmanager

from langchain_core import exceptions

from stepspec.errors import ContextError, EngineError, ModelError, StepSpecError, TargetError, UsageError


class InvalidRequestError(exceptions.ModelInvalidRequestError, UsageError):
    """The request is invalid or not supported."""


class NotFoundError(exceptions.ModelNotFoundError, ModelError):
    """A model cannot be loaded or served."""


class OverflowingContextError(exceptions.ContextOverflowError, ContextError):
    """The conversation is longer than the model's context."""


class FailedError(exceptions.ModelAPIError, EngineError):
    """An engine failed. `committed` is the text that was committed before the failure."""

    committed = ""


class LateError(exceptions.ModelTimeoutError, EngineError):
    """The request exceeded its timeout."""


@contextmanager
def as_langchain_errors() -> Generator[None]:
    """Convert stepspec's errors to LangChain's."""
    try:
        yield
    except exceptions.LangChainException:
        raise
    except ContextError as error:
        raise OverflowingContextError(str(error)) from error
    except ModelError as error:
        raise NotFoundError(str(error)) from error
    except EngineError as error:
        failed = FailedError(str(error))
        failed.committed = error.committed if isinstance(error, TargetError) else ""
        raise failed from error
    except StepSpecError as error:
        raise InvalidRequestError(str(error)) from error
