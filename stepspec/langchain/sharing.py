"""Resources that all chat models share: loaded pairs, and the event loop thread for synchronous calls."""

import threading
from functools import cache

from stepspec.api.pairs import EMBEDDED_NAME
from stepspec.api.session import Pair, load_pair
from stepspec.base.loop_thread import LoopThread

_loading = threading.Lock()
_pairs: dict[tuple[str | None, str | None, str | None], Pair] = {}


def shared_pair(target: str | None, draft: str | None, name: str | None = None) -> Pair:
    """Return the pair with these spec strings or this name. Load it on the first call, which may take minutes.

    Raises:
        UsageError: a spec string is invalid, only the draft is given, or there is no pair with this name.
        ModelError: a model cannot be loaded or served.
    """
    key = _key(target, draft, name)
    with _loading:
        if key not in _pairs:
            _pairs[key] = load_pair(target, draft, pair=name, needs_draft=False)
        return _pairs[key]


def loaded_pair(target: str | None, draft: str | None, name: str | None = None) -> Pair | None:
    """Return the pair if it has been loaded, else None."""
    return _pairs.get(_key(target, draft, name))


def _key(target: str | None, draft: str | None, name: str | None) -> tuple[str | None, str | None, str | None]:
    return (target, draft, name) if (target, draft) != (None, None) else (None, None, name or EMBEDDED_NAME)


@cache
def loop_thread() -> LoopThread:
    """Return the thread for synchronous calls. All calls share one event loop, so that engines can batch them."""
    return LoopThread("stepspec langchain")
