"""What chat models have in common: pairs of models, loaded once and kept, and the thread in which synchronous code is
served."""

import threading
from functools import cache

from stepspec.loop_thread import LoopThread
from stepspec.session import Pair, load_pair

_loading = threading.Lock()
_pairs: dict[tuple[str | None, str | None], Pair] = {}


def shared_pair(target: str | None, draft: str | None) -> Pair:
    """The pair of these spec strings, loaded by whoever asks first, which may take minutes.

    Raises:
        UsageError: a spec string is not one, or only the draft is named.
        ModelError: a model cannot be loaded or served.
    """
    with _loading:
        if (target, draft) not in _pairs:
            _pairs[target, draft] = load_pair(target, draft, needs_draft=False)
        return _pairs[target, draft]


def loaded_pair(target: str | None, draft: str | None) -> Pair | None:
    """The pair, if it has been loaded."""
    return _pairs.get((target, draft))


@cache
def loop_thread() -> LoopThread:
    """Where the calls of synchronous code run; all of them in one loop, so that engines serve them together."""
    return LoopThread("stepspec langchain")
