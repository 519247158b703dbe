"""The log format of lm-evaluation-harness: `MODEL/results_TIME.json` and `MODEL/samples_TASK_TIME.jsonl`.

Verified with lm-eval 0.4.13: both files fit its `result_schema` (except `configs`, where its own logs do not fit
either), its `utils` find and tabulate them, `datasets` loads the samples, and they have the fields that its script for
Zeno and its W&B logger require.

A sample is a problem: its repeats are the responses to one request, and its metrics are their means. `doc_id` counts
the run's problems in the order of their ids. `arguments` hold the question as in the data; the task's `metadata` names
the prompt wording around it. A run does not record the number of examples in a prompt.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from stepspec.base.files import whole_file
from stepspec.evaluation.export.source import ExportedFigures, ExportedRun, Written
from stepspec.evaluation.records import RunRecord, Trace
from stepspec.evaluation.runs import reasoning

NO_ANSWER = "[invalid]"
"""The value that the harness' own filters return if they find no answer."""

HIGHER_IS_BETTER = {"exact_match": True, "wall_s": False, "tokens": False}

FIGURES: Mapping[str, Callable[[ExportedFigures], float]] = {
    "exact_match": lambda outcome: outcome.correct,
    "wall_s": lambda outcome: outcome.wall_s,
    "tokens": lambda outcome: float(outcome.num_tokens),
}
"""The metrics. `tokens` counts committed tokens."""


def write_logs(source: ExportedRun, folder: Path) -> dict[str, Written]:
    """Write results and samples of every policy.

    Raises:
        UsageError, StepSpecError: the run cannot be read.
        OSError: the files cannot be written.
    """
    logs = {policy: _LmEvalLog(source, policy, folder) for policy in source.outcomes}
    with ExitStack() as stack:
        streams = {policy: stack.enter_context(whole_file(log.samples_file)) for policy, log in logs.items()}
        for problem in source.problems:
            for policy, outcomes in source.outcomes.items():
                if problem in outcomes:
                    streams[policy].write(logs[policy].sample_line(outcomes[problem]))
    for log in logs.values():
        with whole_file(log.results_file) as stream:
            stream.write(log.results_text())
    return {policy: log.written() for policy, log in logs.items()}


class _LmEvalLog:
    """One policy's log. The results are written after the samples, because they contain the samples' hash."""

    def __init__(self, source: ExportedRun, policy: str, folder: Path) -> None:
        self._source, self._run, self._policy = source, source.run, policy
        self._started = datetime.fromisoformat(source.run.started).astimezone(UTC)
        time = self._started.replace(tzinfo=None).isoformat().replace(":", "-")
        model_folder = folder / _sanitised(source.model(policy))
        self.samples_file = model_folder / f"samples_{source.run.benchmark}_{time}.jsonl"
        self.results_file = model_folder / f"results_{time}.json"
        self._num_texts = 0
        self._hash = hashlib.sha256()

    def sample_line(self, repeats: Sequence[ExportedFigures]) -> str:
        """Return the line of a problem for the samples file."""
        traces = [self._source.trace(each) for each in repeats]
        sample = self._sample(repeats, traces)
        self._num_texts += sum(trace is not None for trace in traces)
        self._hash.update((sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"]).encode())
        return json.dumps(sample, ensure_ascii=False) + "\n"

    def written(self) -> Written:
        """Return the files and counts of what was written."""
        files = [self.samples_file, self.results_file]
        return Written(files, len(self._source.of(self._policy)), self._num_texts)

    def _sample(self, repeats: Sequence[ExportedFigures], traces: Sequence[Trace | None]) -> dict[str, Any]:
        question = next((trace.question for trace in traces if trace), None)
        first = repeats[0]
        doc = {
            "id": first.problem,
            "question": question,
            "answer": first.gold,
            "level": first.level,
            "subject": first.subject,
        }
        answers = [each.answer if each.answer is not None else NO_ANSWER for each in repeats]
        return {
            "doc_id": self._source.problems[first.problem],
            "doc": doc,
            "target": first.gold,
            "arguments": {"gen_args_0": {"arg_0": question or "", "arg_1": _generation(self._run)}},
            "resps": [[_output_text(trace) for trace in traces]],
            "filtered_resps": [answers[0] if len(answers) == 1 else answers],
            "filter": self._run.grader,
            "metrics": list(FIGURES),
            "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
            "prompt_hash": _hash(question or ""),
            "target_hash": _hash(first.gold),
            **{name: fmean(map(figure, repeats)) for name, figure in FIGURES.items()},
        }

    def results_text(self) -> str:
        """Return the content of `results_TIME.json`."""
        return json.dumps(self._results(), ensure_ascii=False, indent=2) + "\n"

    def _results(self) -> dict[str, Any]:
        run, task, model = self._run, self._run.benchmark, self._source.model(self._policy)
        return {
            "results": {task: self._figures()},
            "group_subtasks": {task: []},
            "configs": {task: self._task()},
            "versions": {task: run.prompt_version},
            "n-shot": {},
            "higher_is_better": {task: HIGHER_IS_BETTER},
            "n-samples": {task: {"original": run.num_problems, "effective": len(self._source.outcomes[self._policy])}},
            "config": _config(run, self._policy),
            "git_hash": run.commit,
            "date": self._started.timestamp(),
            "pretty_env_info": "\n".join(
                f"{name}: {value}" for name, value in {**run.versions, **run.hardware}.items()
            ),
            "transformers_version": run.versions.get("transformers"),
            "task_hashes": {task: self._hash.hexdigest()},
            "model_source": "stepspec",
            "model_name": model,
            "model_name_sanitized": _sanitised(model),
            "total_evaluation_time_seconds": str(self._source.busy_s(self._policy)),
        }

    def _figures(self) -> dict[str, Any]:
        task = self._run.benchmark
        figures: dict[str, Any] = {"name": task, "alias": task, "sample_len": len(self._source.outcomes[self._policy])}
        for name, figure in FIGURES.items():
            mean = self._source.mean(self._policy, figure)
            error = mean.standard_error
            figures[f"{name},{self._run.grader}"] = mean.value
            figures[f"{name}_stderr,{self._run.grader}"] = error if error is not None else "N/A"
        return figures

    def _task(self) -> dict[str, Any]:
        run = self._run
        return {
            "task": run.benchmark,
            "output_type": "generate_until",
            "repeats": run.num_repeats,
            "generation_kwargs": _generation(run),
            "filter_list": [{"name": run.grader}],
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": better}
                for name, better in HIGHER_IS_BETTER.items()
            ],
            "metadata": {
                "data_sha256": run.data_sha256,
                "prompt_id": run.prompt_id,
                "prompt_version": run.prompt_version,
                "policy": run.policies[self._policy].text,
            },
        }


def _generation(run: RunRecord) -> dict[str, Any]:
    return {
        "until": [],
        "max_gen_toks": run.max_tokens,
        "do_sample": run.temperature > 0,
        "temperature": run.temperature,
        "top_p": run.top_p,
    }


def _config(run: RunRecord, policy: str) -> dict[str, Any]:
    models = {role: engine for role, engine in run.engines.items() if engine is not None}
    target = models.get("target")
    return {
        "model": "stepspec",
        "model_args": {**{role: engine.name for role, engine in models.items()}, "policy": policy},
        "model_dtype": target.dtype if target else None,
        "model_sha": target.weights if target else None,
        "device": target.device if target else None,
        "batch_size": str(run.concurrency),
        "batch_sizes": [],
        "limit": None,
        "gen_kwargs": _generation(run),
        "random_seed": run.seed,
    }


def _output_text(trace: Trace | None) -> str:
    """Return reasoning and answer with a blank line between them; empty if there is no trace."""
    if trace is None:
        return ""
    thought = reasoning(trace)
    return f"{thought.rstrip()}\n\n{trace.answer}" if thought.strip() else trace.answer


def _sanitised(name: str) -> str:
    """Return a model's name as the harness writes it in folder names."""
    return re.sub(r'["<>:/|\\?*\[\]]+', "__", name)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
