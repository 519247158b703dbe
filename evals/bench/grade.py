"""Speed of grading, and its robustness against hostile texts.

    python -m evals.bench grade --data test.jsonl --json evals/results/grading.json

`--data` is a jsonl file of problems whose `answer` is a solution with `####`, like GSM8K's. Every solution must be
graded as correct for its own answer.
"""

import json
import resource
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from evals.bench.hostile import hostile_texts
from stepspec.cli.options import SeedOption
from stepspec.cli.output import JsonOption, write_results
from stepspec.evaluation.grade import Grade
from stepspec.evaluation.grade.grader import Grading
from stepspec.evaluation.grade.workers import MEMORY_BYTES
from stepspec.evaluation.machine import commit, hardware, versions

NUM_NUMERIC = 20_000
NUM_SYMBOLIC = 2_000
GOLDS_FOR_HOSTILE = ("12", r"x^2+\sqrt{2}", r"\left(\frac{\pi}{2}, 3\right)", r"\text{no}")

T = TypeVar("T")
Timed = tuple[Grade, float]


def main(
    data: Annotated[Path | None, typer.Option(help="A jsonl file of solutions with ####.")] = None,
    hostile: Annotated[int, typer.Option(min=1, help="Number of hostile texts.")] = 10_000,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that compare formulas.")] = 2,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the speed of grading, and its robustness against hostile texts."""
    figures = {
        "conditions": {"hardware": hardware(), "versions": versions(), "commit": commit(), "workers": workers},
        "solutions": grade_solutions(data) if data else None,
        "numeric": numeric_speed(),
        "symbolic": symbolic_speed(workers),
        "hostile": hostile_cost(hostile, seed, workers),
    }
    print(json.dumps(figures, indent=2))
    write_results(figures, json_file)


def grade_solutions(file: Path) -> Mapping[str, Any]:
    """Return how many solutions are graded as correct for their own answers."""
    solutions = [json.loads(line)["answer"] for line in file.read_text("utf-8").splitlines()]
    with Grading("number") as grading:
        grades = [grading.grade(solution, solution) for solution in solutions]
    return {"n": len(grades), "correct": sum(grade.status == "correct" for grade in grades)}


def numeric_speed() -> Mapping[str, Any]:
    """Return gradings per second for texts of about 1,500 characters, in one thread and with distinct gold answers."""
    thought = "First, she has 3 boxes of 24 pencils each, and 3 * 24 = 72 pencils. Then she gives 12 away. " * 16
    texts = [f"{thought}So the answer is \\boxed{{\\${index:,}.00}}." for index in range(NUM_NUMERIC)]
    with Grading("number") as grading:
        seconds, grades = _timed(lambda: [grading.grade(text, str(index)) for index, text in enumerate(texts)])
    return _speed(seconds, grades)


def symbolic_speed(num_workers: int) -> Mapping[str, Any]:
    """Return gradings per second for formulas that need computer algebra, after a warm-up."""
    rows = [_formulas(index) for index in range(NUM_SYMBOLIC)]
    with Grading("math", num_workers=num_workers) as grading, ThreadPoolExecutor(num_workers) as threads:

        def grade(row: tuple[str, str]) -> Grade:
            return grading.grade(rf"It is \boxed{{{row[1]}}}.", row[0])

        list(threads.map(grade, rows[:100]))
        seconds, grades = _timed(lambda: list(threads.map(grade, rows[100:])))
    return _speed(seconds, grades)


def _formulas(index: int) -> tuple[str, str]:
    """Return a gold answer and an answer. One in five answers is wrong."""
    a, b = index // 5 + 2, index % 7 + 2
    shapes = (
        (rf"\frac{{{a}\sqrt{{3}}}}{{{b}}}", rf"\frac{{{3 * a}}}{{{b}\sqrt{{3}}}}"),
        (rf"{a}x^2+{b}x", rf"x({a}x+{b})"),
        (rf"\frac{{\pi}}{{{a}}}+{b}", rf"{b}+\pi/{a}"),
        (rf"\left({a}, \frac{{\pi}}{{{b}}}\right)", rf"({a}, \pi/{b})"),
        (rf"{a}\sqrt{{2}}-{b}", rf"{b}-{a}\sqrt{{2}}"),
    )
    return shapes[index % 5]


def hostile_cost(number: int, seed: int, num_workers: int) -> Mapping[str, Any]:
    """Return the statuses of hostile texts, and the time and memory that grading them took.

    The times include the start of workers.
    """
    golds = GOLDS_FOR_HOSTILE
    with Grading("math", num_workers=num_workers) as grading, ThreadPoolExecutor(num_workers) as threads:
        grading.grade(r"\boxed{x+1}", "1+x")

        def grade(item: tuple[int, str]) -> Timed:
            start = time.perf_counter()
            grade = grading.grade(item[1], golds[item[0] % len(golds)])
            return grade, time.perf_counter() - start

        items = enumerate(hostile_texts(number, seed))
        seconds, timed = _timed(lambda: list(_in_order(threads, grade, items, 4 * num_workers)))
        living = max((_bytes_of(worker, "VmHWM") or 0 for worker in grading.worker_ids()), default=0)
    # The peak memory of any worker, including those that have ended.
    peak_bytes = max(living, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    each = [taken for _, taken in timed]
    return {
        "n": number,
        "seed": seed,
        "statuses": dict(Counter(grade.status for grade, _ in timed)),
        "longest_s": round(max(each), 3),
        "median_s": round(statistics.median(each), 6),
        "total_s": round(seconds, 1),
        "crashes": sum("ended again" in (grade.why or "") for grade, _ in timed),
        "worker_peak_resident_bytes": peak_bytes,
        "worker_cap_bytes": MEMORY_BYTES,
    }


def _in_order(
    threads: ThreadPoolExecutor, work: Callable[[tuple[int, str]], Timed], items: Iterable[tuple[int, str]], ahead: int
) -> Iterator[Timed]:
    """Yield the results of all items in order, with a bounded number of items in memory."""
    waiting = deque[Future[Timed]]()
    for item in items:
        waiting.append(threads.submit(work, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    yield from (each.result() for each in waiting)


def _bytes_of(process_id: int, field: str) -> int | None:
    """Return a memory figure of a process in bytes, or None if the system does not report it."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text("utf-8")
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _speed(seconds: float, grades: Sequence[Grade]) -> Mapping[str, Any]:
    return {
        "n": len(grades),
        "gradings_per_s": round(len(grades) / seconds, 1),
        "statuses": dict(Counter(grade.status for grade in grades)),
        "decided_by": dict(Counter(grade.decided_by or "nothing" for grade in grades)),
    }
