"""Where a command runs the models: in this process, or on a Ray cluster."""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from stepspec.api.models import Pair, choose_models, load_pair, with_kind
from stepspec.errors import UsageError
from stepspec.evaluation.run import Executor, Local


@contextmanager
def executor_for(
    load: Callable[[], Pair],
    ray: str | None,
    workers: int | None,
    cpus: float | None,
    gpus: float | None,
) -> Generator[Executor]:
    """Yield the executor that the options of a command ask for. Locally, the models load now.

    Args:
        load: loads the models.
        ray: the value of --ray, and those of the options for workers.

    Raises:
        UsageError: the options contradict each other, or there is no such cluster.
    """
    if ray is None:
        given = {"--workers": workers, "--worker-cpus": cpus, "--worker-gpus": gpus}
        if named := [option for option, value in given.items() if value is not None]:
            raise UsageError(f"{named[0]} is for a Ray cluster. Add --ray ADDRESS, or leave it out.")
        print("Loading the models.", file=sys.stderr)
        yield Local(load())
        return
    from stepspec.evaluation.run.on_ray import Cluster, OnRay, connected

    with connected(Cluster(ray, workers, cpus, gpus)) as cluster:
        print(f"Loading the models on the cluster, in up to {_workers(cluster.workers or 1)}.", file=sys.stderr)
        yield OnRay(cluster, load)


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number:,} workers"


def loader(
    target: str | None, draft: str | None, judges: Mapping[str, str], ray: str | None, **given: Any
) -> Callable[[], Pair]:
    """Return a function that loads a pair, here or on a cluster. Arguments are those of `load_pair`.

    Folders of models must have the same paths on all machines of a cluster.
    """
    if ray is None:
        return partial(load_pair, target, draft, judges=judges, **given)
    if target is not None or draft is not None:
        choose_models(target, draft, given.get("pair"))
    elsewhere = {name: _absolute(spec) for name, spec in judges.items()}
    models = [None if spec is None else _absolute(spec) for spec in (target, draft)]
    return partial(load_pair, *models, judges=elsewhere, **given)


def _absolute(spec: str) -> str:
    """Return a spec string with an absolute path, if it names a folder of this machine."""
    kind, _, model = with_kind(spec).partition(":")
    path, mark, options = model.partition("?")
    if kind in ("http", "https") or not path or not Path(path).is_dir():
        return spec
    return f"{kind}:{Path(path).resolve()}{mark}{options}"
