"""Rewrite the generated blocks of a README from results.

    python -m stepspec.bench.readme --readme README.md evals/results/gsm-mini

rewrites the block between `<!-- results:NAME -->` and `<!-- /results -->`, and the headline between
`<!-- headline:NAME -->` and `<!-- /headline -->`. If the folder contains several runs, for example one for each
temperature, both blocks include all of them. For the JSON file of `stepspec bench engine`, it rewrites the results
block called `engine`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from stepspec.bench.speed import EngineSpeeds, speeds_markdown
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.report import read_results, with_block, with_results
from stepspec.evaluation.report.conditions import commit_in_words, hardware_in_words, models_in_words


def speeds_block(speeds: EngineSpeeds) -> str:
    """Return a README block for a benchmark of the torch engine: the table and its conditions."""
    plan, prompt = speeds.plan, "prompt" if speeds.synthetic else "prompt of gsm-mini"
    parts = [
        f"greedy, at most {plan.max_tokens} tokens after each {prompt}",
        f"medians of {plan.turns} paired turns",
        models_in_words({"target": speeds.engine, "draft": speeds.draft}),
        hardware_in_words(speeds.hardware),
        ", ".join(f"{name} {version}" for name, version in speeds.versions.items()),
        commit_in_words(speeds.commit),
    ]
    return f"{speeds_markdown(speeds)}\n\n{'; '.join(parts)}."


def read_speeds(file: Path) -> EngineSpeeds:
    """Load the results of `stepspec bench engine`.

    Raises:
        UsageError: the file does not contain such results.
    """
    try:
        return EngineSpeeds.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"{file} does not contain results of 'stepspec bench engine': {error}.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite a block of a README from results."""
    parser = argparse.ArgumentParser(prog="python -m stepspec.bench.readme", description=main.__doc__)
    parser.add_argument("--readme", type=Path, required=True, help="The file whose block is rewritten.")
    parser.add_argument("results", type=Path, help="Folder of runs, or a file of `stepspec bench engine`.")
    options = parser.parse_args(arguments)
    try:
        text = options.readme.read_text("utf-8")
        if options.results.is_file():
            text = with_block(text, "results", "engine", speeds_block(read_speeds(options.results)))
        else:
            text = with_results(text, read_results(options.results))
        options.readme.write_text(text, "utf-8")
    except OSError as error:
        print(f"Cannot rewrite {options.readme}: {error.strerror}.", file=sys.stderr)
        return 1
    except StepSpecError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
