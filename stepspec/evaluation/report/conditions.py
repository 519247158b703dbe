"""The conditions of a run in words: models, hardware, versions and settings."""

from collections.abc import Mapping

from stepspec.evaluation.records import Conditions, EngineRecord, Node, RunRecord, Summary
from stepspec.evaluation.report.cells import count


def conditions_sentence(run: RunRecord, summary: Summary) -> str:
    """Return one sentence with all conditions of the figures."""
    parts = [
        f"{run.benchmark}, {count(summary.n, 'problem')} under every policy",
        f"temperature {run.temperature:g}, concurrency {run.concurrency}, seed {run.seed}",
        f"at most {run.max_tokens:,} tokens a problem, prompt {run.prompt_id!r}",
        f"{models_in_words(run.engines)}, pair {run.pair}",
        machine_in_words(run),
        *(f"resumed on {machine_in_words(each)}" for each in run.resumed),
    ]
    return f"{'; '.join(parts)}."


def problems_in_words(summary: Summary) -> str:
    """Return the number of problems of a summary, and of those finished under every policy if some are not."""
    total = max((policy.n for policy in summary.policies.values()), default=summary.n)
    finished = f", {summary.n:,} finished under every policy" if total > summary.n else ""
    return f"{count(total, 'problem')}{finished}"


def nodes_in_words(summary: Summary) -> str:
    """Return sentences about the machines of a run on several; empty for a run on one."""
    if not summary.nodes:
        return ""
    nodes = ", ".join(f"{node.name} ({_node_in_words(node)})" for node in summary.nodes)
    sentences = [f"Ran on {count(len(summary.nodes), 'machine')}: {nodes}."]
    if any(node.num_workers > 1 for node in summary.nodes):
        sentences.append("Workers on one machine slow each other, so times there are longer than alone.")
    if summary.num_apart:
        sentences.append(
            f"{count(summary.num_apart, 'request')} ran on different machines under the policies and count for no time."
        )
    return " ".join(sentences)


def _node_in_words(node: Node) -> str:
    hardware = hardware_in_words(node.hardware)
    return f"{hardware}; {node.num_workers} workers" if node.num_workers > 1 else hardware


def machine_in_words(found: Conditions | RunRecord) -> str:
    """Return the hardware, the versions of packages and the commit of a measurement."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return "; ".join([hardware_in_words(found.hardware), versions, commit_in_words(found.commit)])


def commit_in_words(commit: str | None) -> str:
    """Return the abbreviated commit, with `-dirty` if there were uncommitted changes."""
    return f"commit {commit[:12] + commit[40:]}" if commit else "commit unknown"


def models_in_words(engines: Mapping[str, EngineRecord | None]) -> str:
    """Return role, name, dtype and device of each loaded model, and the token-level speculation of its engine."""
    return ", ".join(_model_in_words(role, engine) for role, engine in engines.items() if engine is not None)


def pair_in_words(engines: Mapping[str, EngineRecord | None]) -> str:
    """Return a pair of stepspec by its name, and other models by theirs."""
    target, draft = (engine.name if engine else "none" for engine in map(engines.get, ("target", "draft")))
    pair = target.removesuffix(" target")
    return f"the {pair} pair" if draft == f"{pair} draft" else f"the target {target} and the draft {draft}"


def device_in_words(engine: EngineRecord) -> str | None:
    """Return where a model ran; None if unknown."""
    if engine.device is None or engine.threads is None:
        return engine.device and f"on {engine.device}"
    return f"on {engine.device} with {count(engine.threads, 'thread')}"


def _model_in_words(role: str, engine: EngineRecord) -> str:
    parts = [role, engine.name, engine.dtype, device_in_words(engine)]
    if engine.speculation is None:
        parts.append("(its own token-level speculation is unknown)")
    elif engine.speculation != "none":
        parts.append(f"(drafts tokens by itself under every policy: {engine.speculation})")
    if not engine.forgets:
        parts.append("(its caches are kept between policies)")
    return " ".join(part for part in parts if part)


def hardware_in_words(known: Mapping[str, str | int | float]) -> str:
    """Return the processors and the memory."""
    parts = [str(known["gpu"])] if "gpu" in known else []
    parts.append(f"{known.get('cpu', 'unknown processor')}, {known.get('cores', '?')} cores")
    if "memory_bytes" in known:
        parts.append(f"{float(known['memory_bytes']) / 2**30:.0f} GiB of memory")
    return ", ".join(parts)
