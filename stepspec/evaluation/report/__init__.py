"""Reports: tables for a terminal, a README and Markdown.

The HTML page is in `stepspec.evaluation.report.page`. It needs more libraries, so callers import it on demand.
"""

from stepspec.evaluation.report.cells import UNKNOWN
from stepspec.evaluation.report.conditions import conditions_sentence, nodes_in_words
from stepspec.evaluation.report.figures import COLUMNS
from stepspec.evaluation.report.markdown import markdown_report
from stepspec.evaluation.report.tables import closing_table, readme_table

__all__ = [
    "COLUMNS",
    "UNKNOWN",
    "closing_table",
    "conditions_sentence",
    "markdown_report",
    "nodes_in_words",
    "readme_table",
]
