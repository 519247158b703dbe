"""The log format of inspect_ai, version 2, as JSON: `TIME_TASK_POLICY_ID.json`, for `inspect view` and its readers.

Verified with inspect_ai 0.3.285: `list_eval_logs`, `read_eval_log` with samples and header only, and `samples_df`.

A sample's epoch is the repeat plus one. The assistant's message has the reasoning as one block and the answer as text.
The sample's `metadata` has the origin and scores of each step, and all counts and times of the row. The log's status is
`success` if every row is there, else `cancelled`. Its duration is the time that the policy ran, since the policies of a
run take turns.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from stepspec.base.files import name_for_file, whole_file
from stepspec.evaluation.export.source import ExportedRun
from stepspec.evaluation.records import ResultRow, RunRecord, Status, StepRecord, Trace
from stepspec.evaluation.runs import reasoning

GRADES: Mapping[Status, str] = {
    "correct": "C",
    "incorrect": "I",
    "no_answer": "N",
    "parse_error": "I",
    "timeout": "I",
}
"""The grades of inspect_ai. All but C count as 0."""

KEPT_APART = {"version", "problem", "policy", "repeat", "status", "answer", "gold", "why", "steps"}
"""Fields of a row that a sample stores elsewhere, not in `metadata`."""


@dataclass(frozen=True)
class Written:
    """The log of one policy. `num_texts` is the number of rows whose output texts are known."""

    file: Path
    num_rows: int
    num_texts: int


def write_logs(source: ExportedRun, folder: Path) -> dict[str, Written]:
    """Write the log of every policy.

    Raises:
        UsageError, StepSpecError: the run cannot be read.
        OSError: the files cannot be written.
    """
    logs = {policy: _InspectLog(source, policy, folder) for policy in source.outcomes}
    with ExitStack() as stack:
        streams = {policy: stack.enter_context(whole_file(log.file)) for policy, log in logs.items()}
        for policy, stream in streams.items():
            stream.write(_opened(logs[policy].head()))
        for row in source.rows():
            log = logs[row.policy]
            comma = "," if log.num_samples else ""
            streams[row.policy].write(f"{comma}\n{json.dumps(log.sample(row), ensure_ascii=False)}")
        for stream in streams.values():
            stream.write("\n ]\n}\n")
    return {policy: Written(log.file, log.num_samples, log.num_texts) for policy, log in logs.items()}


def _opened(head: Mapping[str, Any]) -> str:
    """Return a JSON object up to the samples. They come last, so that a reader of the header can stop there."""
    return json.dumps(head, ensure_ascii=False, indent=1).removesuffix("\n}") + ',\n "samples": ['


class _InspectLog:
    """One policy's log."""

    def __init__(self, source: ExportedRun, policy: str, folder: Path) -> None:
        self._source, self._run, self._policy = source, source.run, policy
        self._model = f"stepspec/{source.model(policy)}"
        names = (source.run.started, source.run.benchmark, policy, source.id(policy))
        self.file = folder / ("_".join(name_for_file(name).replace("_", "-") for name in names) + ".json")
        self.num_samples = self.num_texts = 0

    def head(self) -> dict[str, Any]:
        """Return everything but the samples, in the order that readers rely on."""
        run = self._run
        num_planned, num_rows = run.num_problems * run.num_repeats, len(self._source.outcomes[self._policy])
        return {
            "version": 2,
            "status": "success" if num_rows >= num_planned else "cancelled",
            "eval": self._eval(),
            "plan": {
                "name": "plan",
                "steps": [{"solver": "stepspec", "params": {"policy": self._policy}}],
                "config": _generation(run),
            },
            "results": {
                "total_samples": num_planned,
                "completed_samples": num_rows,
                "scores": [self._score()],
            },
            "stats": self._stats(),
        }

    def _eval(self) -> dict[str, Any]:
        run, policy = self._run, self._run.policies[self._policy]
        id = self._source.id(self._policy)
        return {
            "eval_id": id,
            "run_id": self._source.id(),
            "created": run.started,
            "task": run.benchmark,
            "task_id": id,
            "task_version": run.prompt_version,
            "solver": self._policy,
            "dataset": {
                "name": run.benchmark,
                "samples": run.num_problems,
                "sample_ids": self._source.problems,
                "shuffled": False,
            },
            "model": self._model,
            "model_generate_config": _generation(run),
            "model_roles": {
                role: {
                    "model": engine.name,
                    "args": engine.model_dump(exclude={"name"}),
                }
                for role, engine in run.engines.items()
                if engine is not None
            },
            "config": {"epochs": run.num_repeats, "epochs_reducer": ["mean"], "max_samples": run.concurrency},
            "packages": run.versions,
            "metadata": {
                "policy": policy.text,
                "policy_sha256": policy.sha256,
                **run.model_dump(
                    include={"data_sha256", "prompt_id", "prompt_version", "pair", "seed", "commit", "hardware"}
                ),
            },
            "scorers": [{"name": run.grader, "metrics": [{"name": "accuracy"}, {"name": "stderr"}]}],
        }

    def _score(self) -> dict[str, Any]:
        shares = self._source.correct(self._policy)
        error = stdev(shares) / sqrt(len(shares)) if len(shares) > 1 else 0.0
        figures = {"accuracy": fmean(shares), "stderr": error}
        return {
            "name": self._run.grader,
            "scorer": self._run.grader,
            "reducer": "mean" if self._run.num_repeats > 1 else None,
            "scored_samples": len(self._source.outcomes[self._policy]),
            "unscored_samples": 0,
            "metrics": {name: {"name": name, "value": value} for name, value in figures.items()},
        }

    def _stats(self) -> dict[str, Any]:
        started = datetime.fromisoformat(self._run.started)
        completed = started + timedelta(seconds=self._source.busy_s(self._policy))
        return {
            "started_at": started.isoformat(),
            "completed_at": completed.isoformat(timespec="seconds"),
            "model_usage": {self._model: self._usage()},
            "role_usage": self._role_usage(),
        }

    def _usage(self) -> dict[str, int]:
        rows = self._source.outcomes[self._policy]
        return _usage(sum(row.num_prompt_tokens for row in rows), sum(row.tokens.committed for row in rows))

    def _role_usage(self) -> dict[str, dict[str, int]]:
        """Return the tokens that target and draft read and wrote, if their engines report them."""
        total: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for block in self._source.blocks(self._policy):
            for role, usage in (block.usage or {}).items():
                total[role].update(usage.model_dump())
        return {
            role: {
                "input_tokens": usage["prompt_tokens"] - usage["cached_tokens"],
                "input_tokens_cache_read": usage["cached_tokens"],
                "output_tokens": usage["generated_tokens"],
                "total_tokens": usage["prompt_tokens"] + usage["generated_tokens"],
            }
            for role, usage in total.items()
        }

    def sample(self, row: ResultRow) -> dict[str, Any]:
        """Return the sample of a row, with its text if the run stored it."""
        trace = self._source.trace(row)
        self.num_samples += 1
        self.num_texts += trace is not None
        usage = _usage(row.num_prompt_tokens, row.tokens.committed)
        usage["reasoning_tokens"] = sum(step.num_tokens for step in row.steps)
        id = self._source.id(*map(str, row.key))
        messages = _messages(trace, self._model, id) if trace else []
        steps = [_step(step) for step in (trace or row).steps]
        limit = {"type": "token", "limit": self._run.max_tokens} if row.finish_reason == "length" else None
        return {
            "id": row.problem,
            "epoch": row.repeat + 1,
            "input": trace.question if trace else "",
            "target": row.gold,
            "messages": messages,
            "output": {
                "model": self._model,
                "choices": [{"message": each, "stop_reason": _stop_reason(row)} for each in messages[1:]],
                "completion": trace.answer if trace else "",
                "usage": usage,
                "time": row.wall_s,
            },
            "scores": {
                self._run.grader: {
                    "value": GRADES[row.status],
                    "answer": row.answer,
                    "explanation": row.why,
                    "metadata": {"status": row.status},
                }
            },
            "metadata": {**row.model_dump(exclude=KEPT_APART), "steps": steps},
            "model_usage": {self._model: usage},
            "total_time": row.wall_s,
            "working_time": row.wall_s - row.time_s.queue,
            "uuid": id,
            "limit": limit,
        }


def _messages(trace: Trace, model: str, id: str) -> list[dict[str, Any]]:
    """Return the user message with the question and the assistant message with the output."""
    thought = reasoning(trace)
    blocks = [{"type": "reasoning", "reasoning": thought}] if thought else []
    return [
        {"id": f"{id}-user", "role": "user", "content": trace.question, "source": "input"},
        {
            "id": f"{id}-assistant",
            "role": "assistant",
            "content": [*blocks, {"type": "text", "text": trace.answer}],
            "source": "generate",
            "model": model,
        },
    ]


def _step(step: StepRecord) -> dict[str, Any]:
    return step.model_dump(exclude=None if step.text is not None else {"text"})


def _stop_reason(row: ResultRow) -> str:
    return "max_tokens" if row.finish_reason == "length" else "stop"


def _generation(run: RunRecord) -> dict[str, Any]:
    return {"max_tokens": run.max_tokens, "temperature": run.temperature, "top_p": run.top_p, "seed": run.seed}


def _usage(num_input: int, num_output: int) -> dict[str, int]:
    return {"input_tokens": num_input, "output_tokens": num_output, "total_tokens": num_input + num_output}
