"""Resources that all chat models share: loaded models, and the event loop thread for synchronous calls."""

import threading
from collections.abc import Collection
from dataclasses import replace
from functools import cache

from stepspec.api.models import JudgeSpecs, Pair, check_judge_spec, choose_judges, load_judge, load_pair
from stepspec.api.pairs import EMBEDDED_NAME
from stepspec.base.loop_thread import LoopThread
from stepspec.engines.judge_model import JudgeModel

_loading = threading.Lock()
_pairs: dict[tuple[str | None, str | None, str | None], Pair] = {}
_judges: dict[str, JudgeModel] = {}


def shared_pair(
    target: str | None,
    draft: str | None,
    name: str | None = None,
    judges: JudgeSpecs | None = None,
    judge_names: Collection[str] = (),
) -> Pair:
    """Return the pair with these spec strings or this name, with judge models. Loading may take minutes.

    Args:
        target, draft, name: the models, as in `load_pair`. Pairs with the same models share them.
        judges: judge models by name, see `load_pair`. Pairs with the same spec strings of judge models share them.
        judge_names: names of judge models that the policy needs. A named pair may have them.

    Raises:
        UsageError: a spec string is invalid, only the draft is given, or there is no pair with this name.
        ModelError: a model cannot be loaded or served.
    """
    key = _key(target, draft, name)
    for title, spec in (judges or {}).items():
        check_judge_spec(title, spec)
    with _loading:
        if key not in _pairs:
            _pairs[key] = load_pair(target, draft, pair=name, needs_draft=False)
        specs = choose_judges(judges or {}, judge_names, _pairs[key].folder)
        for title, spec in specs.items():
            if isinstance(spec, str) and spec not in _judges:
                _judges[spec] = load_judge(title, spec)
        models = {
            title: _judges[spec] if isinstance(spec, str) else load_judge(title, spec) for title, spec in specs.items()
        }
        return replace(_pairs[key], judges=models) if models else _pairs[key]


def loaded_pair(target: str | None, draft: str | None, name: str | None = None) -> Pair | None:
    """Return the pair if it has been loaded, else None."""
    return _pairs.get(_key(target, draft, name))


def _key(target: str | None, draft: str | None, name: str | None) -> tuple[str | None, str | None, str | None]:
    return (target, draft, name) if (target, draft) != (None, None) else (None, None, name or EMBEDDED_NAME)


@cache
def loop_thread() -> LoopThread:
    """Return the thread for synchronous calls. All calls share one event loop, so that engines can batch them."""
    return LoopThread("stepspec langchain")
