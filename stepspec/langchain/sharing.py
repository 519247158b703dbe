"""What chat models have in common: pairs of models, loaded once and kept, and the thread in which synchronous code is
served."""

import threading
from functools import cache

from stepspec.api.pairs import EMBEDDED_NAME
from stepspec.api.session import Pair, load_pair
from stepspec.base.loop_thread import LoopThread

_loading = threading.Lock()
_pairs: dict[tuple[str | None, str | None, str | None], Pair] = {}


def shared_pair(target: str | None, draft: str | None, name: str | None = None) -> Pair:
    """Load the models of these spec strings, or the pair of that name, once. Loading may take minutes.

    Raises:
        UsageError: a spec string is not one, only the draft is named, or there is no pair of that name.
        ModelError: a model cannot be loaded or served.
    """
    key = _key(target, draft, name)
    with _loading:
        if key not in _pairs:
            _pairs[key] = load_pair(target, draft, pair=name, needs_draft=False)
        return _pairs[key]


def loaded_pair(target: str | None, draft: str | None, name: str | None = None) -> Pair | None:
    """The same, if it has been loaded."""
    return _pairs.get(_key(target, draft, name))


def _key(target: str | None, draft: str | None, name: str | None) -> tuple[str | None, str | None, str | None]:
    return (target, draft, name) if (target, draft) != (None, None) else (None, None, name or EMBEDDED_NAME)


@cache
def loop_thread() -> LoopThread:
    """Where the calls of synchronous code run; all of them in one loop, so that engines serve them together."""
    return LoopThread("stepspec langchain")
