"""The HTML report: one self-contained file that makes no network requests.

`page.html.jinja` is the template, `page.css` the style, and `page.js` reads the embedded rows and traces. A content
security policy allows only these scripts, by their hashes, and no connections. Text from models is inserted as text.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from stepspec import __version__
from stepspec.base.files import package_folder
from stepspec.evaluation.calibrate.records import Calibrated
from stepspec.evaluation.report import colours
from stepspec.evaluation.report.calibration import PATH_HEAD, path_rows
from stepspec.evaluation.report.findings import differing_conditions
from stepspec.evaluation.report.page.view import RunView, view_of
from stepspec.evaluation.report.page_data import embed
from stepspec.evaluation.report.plots import path_plot, sweep_plots
from stepspec.evaluation.report.source import Source, settings_of

TRACE_CHARACTERS = 5_000_000
"""Maximum characters of the page for the traces of all runs."""


def make_page(sources: Sequence[Source], calibrations: Sequence[Calibrated] = ()) -> str:
    """Return the HTML page of one run, or of several that the reader can switch between, such as a sweep.

    Args:
        sources: the runs.
        calibrations: the calibrations that runs belong to, to be shown first.

    Raises:
        UsageError: a trace is damaged.
        StepSpecError: a file cannot be read.
    """
    settings = settings_of([source.run for source in sources], [source.folder for source in sources])
    views = [
        _view(f"r{number}", setting, source, TRACE_CHARACTERS // len(sources))
        for number, (setting, source) in enumerate(zip(settings, sources, strict=True))
    ]
    scripts = {name: _file(f"{name}.js") for name in ("theme", "page")}
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            views=views,
            calibrations=[_calibration_view(f"c{number}", each) for number, each in enumerate(calibrations)],
            sweep=list(sweep_plots("sweep", [source.summary for source in sources])) if len(sources) > 1 else [],
            warnings=differing_conditions([source.run for source in sources]),
            light=Markup(colours.css(dark=False)),
            dark=Markup(colours.css(dark=True)),
            style=Markup(_file("page.css")),
            scripts={name: Markup(script) for name, script in scripts.items()},
            allowed=" ".join(map(_source_hash, scripts.values())),
            version=__version__,
        )
    )


def _calibration_view(key: str, results: Calibrated) -> dict[str, Any]:
    return {
        "benchmark": results.identity.benchmark,
        "sentences": results.sentences,
        "head": PATH_HEAD,
        "rows": path_rows(results),
        "plots": list(path_plot(key, results)),
    }


def _view(key: str, setting: str, source: Source, budget: int) -> RunView:
    policies = list(dict.fromkeys([*source.summary.policies, *source.tally.policies]))
    return view_of(key, setting, source, embed(policies, source.tally, source.traces, budget))


def _source_hash(script: str) -> str:
    """Return the hash of a script in the form of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return (package_folder() / "evaluation" / "report" / "page" / name).read_text("utf-8")


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=[],
    )
