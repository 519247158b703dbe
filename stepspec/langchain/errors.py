"""What goes wrong, as LangChain's own exceptions, which are ours too: code that catches either goes on working."""

from collections.abc import Generator
from contextlib import contextmanager

from langchain_core import exceptions

from stepspec.errors import ContextError, EngineError, ModelError, StepSpecError, TargetError, UsageError


class InvalidRequestError(exceptions.ModelInvalidRequestError, UsageError):
    """What was asked for cannot be done as asked."""


class NotFoundError(exceptions.ModelNotFoundError, ModelError):
    """A model cannot be loaded or served."""


class OverflowingContextError(exceptions.ContextOverflowError, ContextError):
    """The conversation is longer than the model's context."""


class FailedError(exceptions.ModelAPIError, EngineError):
    """An engine failed. `committed` is the text that had been committed by then."""

    committed = ""


class LateError(exceptions.ModelTimeoutError, EngineError):
    """The time that was given for a request is over."""


@contextmanager
def as_langchain_errors() -> Generator[None]:
    """Lets errors of ours pass as LangChain's."""
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
