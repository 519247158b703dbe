"""Prometheus metrics of the service: under stepspec's own names, and under vLLM's where both mean the same."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from stepspec import __version__
from stepspec.api.models import Pair
from stepspec.chat.events import AnswerDelta, ToolCalled
from stepspec.loop.result import Event, Result
from stepspec.loop.step import StepCommitted, StepDelta
from stepspec.serve.admission import Admission

MODEL = ("model_name",)
VLLM = ("model_name", "engine")
LABELS = ("model_name", "policy")
LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
"""Upper bounds of the histograms of seconds."""

TOKEN_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5)
"""The same for the seconds of a token or of a judgment."""

ENGINE = "0"
"""vLLM's label of an engine in its process, of which stepspec has one."""

Outcome = Literal["stop", "length", "tool_calls", "error", "refused", "cancelled"]
FINISHED: Mapping[str, str] = {"tool_calls": "stop", "refused": "error", "cancelled": "abort"}
"""Outcomes that vLLM calls otherwise."""

HISTOGRAMS: Mapping[str, tuple[str, str | None, tuple[float, ...]]] = {
    "queue_seconds": ("Seconds in the service's queue.", "request_queue_time_seconds", LATENCIES),
    "time_to_first_thought_seconds": ("Seconds until the first step was committed.", None, LATENCIES),
    "time_to_first_answer_seconds": ("Seconds until the first token of the answer.", None, LATENCIES),
    "time_to_first_token_seconds": (
        "Seconds until the first output of any kind.",
        "time_to_first_token_seconds",
        LATENCIES,
    ),
    "request_seconds": ("Seconds of a whole request.", "e2e_request_latency_seconds", LATENCIES),
    "time_per_token_seconds": (
        "Seconds of a committed token after the first output.",
        "request_time_per_output_token_seconds",
        TOKEN_LATENCIES,
    ),
    "judge_seconds": ("Seconds in which a step was judged, the mean of a request.", None, TOKEN_LATENCIES),
}
"""By name: help, vLLM's name, and bounds."""

COUNTERS: Mapping[str, tuple[str, str | None]] = {
    "prompt_tokens": ("Tokens of prompts.", "prompt_tokens"),
    "cached_tokens": ("Tokens of prompts that the target had cached.", "prompt_tokens_cached"),
    "committed_tokens": ("Tokens of thinking and answers.", "generation_tokens"),
    "draft_tokens": ("Committed tokens that the draft wrote.", None),
    "wasted_tokens": ("Tokens that a model generated and that were not committed.", None),
    "target_passes": (
        "Forward passes of the target, judging included. A pass that requests share counts for each of them.",
        None,
    ),
    "steps_judged": ("Steps of the draft that were judged.", None),
    "steps_accepted": ("Steps of the draft that were accepted.", None),
    "token_drafted": ("Tokens drafted by token-level speculation.", "spec_decode_num_draft_tokens"),
    "token_accepted": ("Drafted tokens that the target accepted.", "spec_decode_num_accepted_tokens"),
    "token_rounds": ("Rounds of token-level speculation.", "spec_decode_num_drafts"),
}
"""By name: help, and vLLM's name."""


class Monitor:
    """The metrics of a service, in a registry of their own."""

    def __init__(self, admission: Admission, pairs: Mapping[str, Pair], policy: str) -> None:
        """`policy`: the default one, whose metrics are there before the first request."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        Info("stepspec_build", "The service.", registry=self.registry).info({"version": __version__})
        made: dict[str, Any] = {"registry": self.registry, "labelnames": LABELS}
        self._histograms = {
            name: Histogram(f"stepspec_{name}", about, buckets=bounds, **made)
            for name, (about, _, bounds) in HISTOGRAMS.items()
        }
        self._counters = {name: Counter(f"stepspec_{name}", about, **made) for name, (about, _) in COUNTERS.items()}
        self._positions = Counter(
            "stepspec_token_accepted_per_position",
            "Drafted tokens that the target accepted, by position in the draft.",
            (*LABELS, "position"),
            registry=self.registry,
        )
        self._requests = Counter(
            "stepspec_requests", "Answers by how they ended.", (*LABELS, "outcome"), registry=self.registry
        )
        self._rejections = Counter(
            "stepspec_rejections", "Requests that were turned away.", ("reason",), registry=self.registry
        )
        self._responses = Counter(
            "stepspec_http_responses", "Responses by HTTP status.", ("status",), registry=self.registry
        )
        self._up = Gauge(
            "stepspec_engine_up",
            "Whether the last call of a model succeeded.",
            ("model_name", "role"),
            registry=self.registry,
        )
        for name, pair in pairs.items():
            for counter in self._counters.values():
                counter.labels(name, policy)
            for role in ("target", *(["draft"] if pair.draft is not None else [])):
                self._up.labels(name, role).set(1)
        self.registry.register(_Engines(admission, pairs))
        aliases: dict[Any, str] = {self._histograms[name]: vllm for name, (_, vllm, _) in HISTOGRAMS.items() if vllm}
        aliases |= {self._counters[name]: vllm for name, (_, vllm) in COUNTERS.items() if vllm}
        aliases[self._positions] = "spec_decode_num_accepted_tokens_per_pos"
        aliases[self._requests] = "request_success"
        self.registry.register(_Aliases(aliases))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def responded(self, status: int) -> None:
        """Count a response."""
        self._responses.labels(str(status)).inc()

    def rejected(self, reason: str) -> None:
        """Count a request that was turned away."""
        self._rejections.labels(reason).inc()

    def watch(self, model: str, policy: str, pair: Pair, since: float) -> "Watch":
        """Return what observes one answer. `since`: when its request arrived (`time.perf_counter`)."""
        return Watch(self, (model, policy), pair, since)

    def observe(self, name: str, labels: tuple[str, str], seconds: float) -> None:
        """Add a value to a histogram of `HISTOGRAMS`."""
        self._histograms[name].labels(*labels).observe(seconds)

    def count(self, labels: tuple[str, str], numbers: Mapping[str, float]) -> None:
        """Add to counters of `COUNTERS`."""
        for name, number in numbers.items():
            if number:
                self._counters[name].labels(*labels).inc(number)

    def ended(self, labels: tuple[str, str], outcome: Outcome, pair: Pair) -> None:
        """Count an answer by how it ended."""
        self._requests.labels(*labels, outcome).inc()
        if outcome not in ("refused", "cancelled"):
            self._up.labels(labels[0], "target").set(outcome != "error")
        if pair.draft is not None:
            self._up.labels(labels[0], "draft").set(pair.breaker.is_closed)

    def accepted_at(self, labels: tuple[str, str], counts: Iterable[int]) -> None:
        """Count accepted tokens by position in the draft."""
        for position, count in enumerate(counts):
            self._positions.labels(*labels, str(position)).inc(count)


class Watch:
    """Observes one answer."""

    def __init__(self, monitor: Monitor, labels: tuple[str, str], pair: Pair, since: float) -> None:
        self._monitor, self._labels, self._pair, self._since = monitor, labels, pair, since
        self._firsts: dict[str, float] = {}
        self.outcome: Outcome | None = None

    def queued(self, seconds: float) -> None:
        """Note how long the request has waited."""
        self._monitor.observe("queue_seconds", self._labels, seconds)

    def saw(self, event: Event) -> None:
        """Note an event."""
        if isinstance(event, StepDelta | StepCommitted):
            self._first("time_to_first_thought_seconds")
        elif isinstance(event, AnswerDelta | ToolCalled):
            self._first("time_to_first_answer_seconds")

    @property
    def first_s(self) -> float | None:
        """Seconds until the first output, if there was one."""
        return min(self._firsts.values(), default=None)

    def _first(self, name: str) -> None:
        if name in self._firsts:
            return
        seconds = self._firsts[name] = time.perf_counter() - self._since
        self._monitor.observe(name, self._labels, seconds)
        if len(self._firsts) == 1:
            self._monitor.observe("time_to_first_token_seconds", self._labels, seconds)

    def done(self, result: Result) -> None:
        """Note the result."""
        monitor, labels, counts, times = self._monitor, self._labels, result.counts, result.times
        self.outcome = result.finish_reason
        seconds = time.perf_counter() - self._since
        monitor.observe("request_seconds", labels, seconds)
        if self.first_s is not None and counts.committed > 1:
            rest = seconds - self.first_s
            monitor.observe("time_per_token_seconds", labels, rest / (counts.committed - 1))
        if counts.steps_judged:
            monitor.observe("judge_seconds", labels, times.judge / counts.steps_judged)
        rounds = result.token_rounds
        monitor.count(
            labels,
            {
                "prompt_tokens": result.num_prompt_tokens,
                "cached_tokens": result.usage.cached_tokens,
                "committed_tokens": counts.committed,
                "draft_tokens": counts.accepted,
                "wasted_tokens": counts.wasted,
                "target_passes": counts.target_passes,
                "steps_judged": counts.steps_judged,
                "steps_accepted": counts.steps_accepted,
                "token_drafted": counts.token_drafted,
                "token_accepted": counts.token_accepted,
                "token_rounds": rounds.num_rounds if rounds is not None else 0,
            },
        )
        if rounds is not None:
            monitor.accepted_at(labels, rounds.accepted_at)

    def end(self, outcome: Outcome) -> None:
        """Note the end; `outcome` counts if there is no result."""
        self._monitor.ended(self._labels, self.outcome or outcome, self._pair)


class _Aliases(Collector):
    """Gives metrics under vLLM's names, too, when the metrics are requested."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        """`names`: vLLM's names of metrics, without their prefix."""
        self._names = names

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for metric, vllm in self._names.items():
            for family in metric.collect():
                alias = Metric(f"vllm:{vllm}", family.documentation, family.type)
                alias.samples = _merged(_renamed(sample, family.name, alias.name) for sample in family.samples)
                yield alias


def _renamed(sample: Sample, old: str, new: str) -> Sample:
    labels = {**sample.labels, "engine": ENGINE}
    if outcome := labels.pop("outcome", None):
        labels["finished_reason"] = FINISHED.get(outcome, outcome)
    return sample._replace(name=sample.name.replace(old, new, 1), labels=labels)


def _merged(samples: Iterable[Sample]) -> list[Sample]:
    """Add up samples with the same labels: several outcomes have the same name in vLLM."""
    sums: dict[Any, Sample] = {}
    for sample in samples:
        key = sample.name, *sorted(sample.labels.items())
        known = sums.get(key)
        sums[key] = sample if known is None else known._replace(value=known.value + sample.value)
    return list(sums.values())


class _Engines(Collector):
    """Reads the queue and the engines when the metrics are requested."""

    def __init__(self, admission: Admission, pairs: Mapping[str, Pair]) -> None:
        self._admission, self._pairs = admission, pairs

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        running = GaugeMetricFamily("stepspec_requests_running", "Answers that are being generated.", labels=MODEL)
        queued = GaugeMetricFamily("stepspec_requests_queued", "Requests in the service's queue.", labels=MODEL)
        aliases = [GaugeMetricFamily(f"vllm:num_requests_{name}", "", labels=VLLM) for name in ("running", "waiting")]
        for name in self._pairs:
            counts = self._admission.num_running_of(name), self._admission.num_queued_of(name)
            for family, alias, count in zip((running, queued), aliases, counts, strict=True):
                family.add_metric([name], count)
                alias.add_metric([name, ENGINE], count)
        tokens = self._admission.num_queued_tokens
        yield from (running, queued, *aliases)
        yield GaugeMetricFamily("stepspec_queued_tokens", "Prompt tokens in the service's queue.", tokens)
        yield from self._passes()

    def _passes(self) -> Iterable[Metric]:
        labels = ("model_name", "role", "kind")
        passes = CounterMetricFamily("stepspec_engine_passes", "Forward passes.", labels=labels)
        seconds = CounterMetricFamily("stepspec_engine_seconds", "Seconds of calls in passes.", labels=labels)
        rounds = CounterMetricFamily(
            "stepspec_engine_rounds",
            "Passes that write, times their calls; divided by passes, the batch.",
            labels=labels[:2],
        )
        moves = CounterMetricFamily("stepspec_engine_moves", "Calls that went on at another server.", labels=labels[:2])
        for name, pair in self._pairs.items():
            for role, engine in (("target", pair.target), ("draft", pair.draft)):
                if engine is None:
                    continue
                metrics = engine.metrics()
                moves.add_metric([name, role], metrics.moves)
                rounds.add_metric([name, role], metrics.rounds)
                for kind, count in metrics.passes.items():
                    passes.add_metric([name, role, kind], count)
                for kind, spent in metrics.seconds.items():
                    seconds.add_metric([name, role, kind], spent)
        yield from (passes, seconds, rounds, moves)
