"""Check that the tests see faults: apply each to a copy of the checkout, and print those that no test catches.

Each fault replaces a text that occurs exactly once in the package, so that it survives renamed and moved files. It
names the tests that should see it, which take at most 3 minutes. First, these tests must pass in an unchanged copy, and
fail in one whose package cannot be imported, which shows that it is the copy that they test.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, NamedTuple

import typer

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "stepspec"
MAX_SECONDS = 600.0
"""Seconds after which a test file counts as hanging, with room for a busy machine."""


class Fault(NamedTuple):
    """A small fault in the package."""

    name: str
    old: str
    """Text that occurs exactly once in the package."""
    new: str
    tests: str
    """Test files or node ids under `tests/`, separated by spaces."""


TESTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    # Token acceptance, sampling, caches and schemas in the torch engine
    "torch_engine/test_sampling.py": {
        "zero-probability": ("accept_noise * q_drafted < p_drafted", "accept_noise * q_drafted <= p_drafted"),
        "residual": ("left = (p - q).clamp(min=0)", "left = (p - q).abs()"),
        "top-p": ("reached - ordered < top_p", "reached < top_p"),
        "shared-noise": ("_number(key, position * 4 + purpose)", "_number(key, position * 4)"),
    },
    "torch_engine/test_sampling.py torch_engine/test_batching.py": {
        "shorter-draft": ("(num_kept == counts)[:, None], p_next", "(num_kept == width)[:, None], p_next"),
    },
    "torch_engine/test_acceptance.py": {
        "relaxed-window": ("- count == window[:, None]", "- count >= window[:, None] - 1"),
        "relaxed-special": ("(kinds < how.exact_from[:, None])", "(kinds <= how.exact_from[:, None])"),
        "relaxed-truncated": ("return found & (possible if", "return found & (possible | True if"),
    },
    "torch_engine/test_slot_attention.py": {
        "branch-trunk": ("(key_branch == 0)[None] & (position[None] < trunk_end[:, None])", "(key_branch == 0)[None]"),
        "branch-window": ("position - tl.load(column + count, mask=new, other=0)", "position"),
        "sinks": ("+ tl.exp2(sink - top)", "+ 0.0"),
    },
    "torch_engine/test_greedy.py::test_all_families_equal_transformers": {
        "stale-rows": ("found.table[2, num_rows:].zero_()", "pass"),
        "stale-branches": ("found.branches.zero_()", "pass"),
    },
    "torch_engine/test_torch_stops.py": {
        "stop-in-draft": ("return min(num_drafted, count)", "return num_drafted"),
    },
    "torch_engine/test_slots.py": {
        "cache-group": ("if slot.ids and slot.group == group", "if slot.ids"),
        "cache-agreement": ("slot.agreed = min(prompt_length, held)", "slot.agreed = held"),
    },
    "torch_engine/test_constraint.py::test_what_the_grammar_cannot_hold_is_rejected": {
        "schema-number": ("(abs(number) < 2**62 and float(number) == number)", "abs(number) < 2**62"),
    },
    "test_hostile_drafts.py::test_no_token_of_an_answer_is_the_draft_s_alone": {
        "relaxed-answer": ("first_own = 0 if is_last", "first_own = 0 if opens_call"),
        "relaxed-last": ("if held and not step.num_written:", "if held and step.num_written < 0:"),
    },
    # Steps: judges, salvage, counts and limits
    "test_judges.py::test_a_step_is_accepted_from_the_threshold_on": {
        "threshold": ("if score >= self.threshold:", "if score > self.threshold:"),
    },
    "test_judges.py::test_a_step_is_accepted_if_no_judge_rejects_it": {
        "veto": ('"accept" in decisions and "reject" not in decisions, scores', '"accept" in decisions, scores'),
    },
    "test_controller.py": {
        "salvage": ("if not own_choice and logprobs[index] < min_logprob:", "if logprobs[index] < min_logprob:"),
        "end-tag": (
            "proposal.ids if proposal.tag is not None and proposal.tag == chosen else",
            "proposal.ids if proposal.tag is not None else",
        ),
        "repeated-step": ("proposal.text.strip() == before.strip(), ", "proposal.text == before, "),
        "rejected-count": ("num_rejected = len(proposal.ids) - len(accepted)", "num_rejected = 0"),
    },
    "test_ledger.py": {
        "waste": (
            "rate * (self._num_committed + max_step_tokens)",
            "rate * (self._num_committed + 2 * max_step_tokens)",
        ),
    },
    "test_demands.py::test_the_limits_of_time_count_the_time_in_a_queue": {
        "deadline": ("get_running_loop().time() + seconds - spent_s", "get_running_loop().time() + seconds"),
    },
    # Prompts, thinking and tool calls
    "test_prompts.py": {
        "start-token": (
            "self.add_special_tokens and start and ids[: len(start)] != start",
            "self.add_special_tokens and start",
        ),
    },
    "test_thinking.py::test_a_tool_call_ends_the_thinking": {
        "implicit-end": ('"thinking" if id in self._ends else', '"thinking" if id == self.end else'),
    },
    "test_thinking.py::test_a_tag_inside_an_earlier_answer_is_text_and_reasoning_that_is_given_stays": {
        "earlier-thinking": ("if opening and text.startswith(opening) and ended:", "if ended:"),
    },
    "test_calls.py": {
        "tool-name": ('return _invalid(text, f"There is no tool {name!r}.", name)', "pass"),
        "escaped-quote": ('self.in_string = letter == "\\\\", letter', "self.in_string = False, letter"),
    },
    # The service
    "chat/test_admission.py": {
        "running-limit": (
            "if self.num_running and self.num_running + ticket.num_answers > self",
            "if self.num_running and self.num_running + ticket.num_answers >= self",
        ),
        "fair-queue": (
            "return ticket.priority, self._served[ticket.client], number",
            "return ticket.priority, 0, number",
        ),
    },
    "chat/test_keys.py::test_the_limit_of_a_key_is_429_with_the_time_to_wait": {
        "key-rate": ("used + self.elsewhere.get(key, 0) >= most", "used + self.elsewhere.get(key, 0) > most"),
    },
    "chat/test_responses_format.py": {
        "stream-end": ('(b"" if answer.named_events else DONE)', "DONE"),
    },
    "chat/test_fields.py": {
        "bias-range": ("(highest := max(bias)) >= num_ids", "(highest := max(bias)) > num_ids"),
    },
    "test_ray.py::test_without_keys_only_this_machine_is_answered": {
        "ray-hosts": ("hosts=hosts, is_local=not is_open", "hosts=hosts, is_local=False"),
    },
    # Grading, statistics and reports
    "test_repeats.py": {
        "pass-at-k": ("1 - comb(self.n - self.correct, k) / comb(self.n, k)", "1 - (1 - self.correct / self.n) ** k"),
        "majority-tie": ("Fraction(number, 1 + ties)", "Fraction(number)"),
    },
    "grade/test_rules.py::test_every_rule_in_the_docstring_holds": {
        "percent": ("plain.denominator > 1 and plain == share / 100", "plain == share / 100"),
        "form": ("len(forms) == 1 or", "bool(forms) or"),
    },
    "stats/test_intervals.py": {
        "wilson": ("z * z / (4 * n * n)", "z * z / (4 * n)"),
    },
    "stats/test_paired.py": {
        "mcnemar": ("only_second).pvalue", 'only_second, alternative="greater").pvalue'),
    },
    "stats/test_betting.py": {
        "bet": ("[[0.0], np.cumsum((losses - means) ** 2)[:-1]]", "[[], np.cumsum((losses - means) ** 2)]"),
    },
    "report/test_findings.py": {
        "draft-verdict": ("elif policy.accuracy_delta_ci[1] < 0:", "elif policy.accuracy_delta_ci[0] < 0:"),
    },
    # Runs, replay, calibration and policies
    "test_evaluate.py::test_parts_of_several_machines_are_merged_without_duplicate_rows": {
        "merge": ("in iter_rows(part) if row.key not in done}", "in iter_rows(part)}"),
    },
    "test_replay.py::test_a_recorded_policy_replays_as_it_ran": {
        "replay": ("Decided(False, _salvaged(step, policy.salvage.min_logprob)", "Decided(False, 0"),
    },
    "test_calibrate.py::test_a_certified_setting_is_not_replaced_by_one_that_is_not": {
        "sequence": (
            '(tested and tested[-1].status != "certified")',
            '(tested and tested[-1].status == "loses more")',
        ),
    },
    "test_policy.py": {
        "exact-cascade": (
            'all(decides) if self.judging == "cascade" else',
            'any(decides) if self.judging == "cascade" else',
        ),
    },
}
"""The faults: by the tests that should see them and by name, the old text and the new one."""

FAULTS = [Fault(name, *texts, tests) for tests, faults in TESTS.items() for name, texts in faults.items()]


@dataclass(frozen=True)
class Outcome:
    """Whether the tests of a fault caught it, and the seconds that they took."""

    name: str
    caught: bool
    seconds: float


class Checkout:
    """A copy of the checkout, as it is now, in which one fault at a time is applied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        for name in listed.stdout.decode().split("\0"):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def check(self, tests: Sequence[str]) -> None:
        """Check that the tests pass in the copy, and that they fail if its package cannot be imported.

        Raises:
            typer.BadParameter: they do not.
        """
        passed, output = self._run(tests)
        if not passed:
            print(output)
            raise typer.BadParameter("The tests fail without a fault.")
        if self._pass_with(self._folder / PACKAGE / "__init__.py", "raise RuntimeError\n", tests):
            raise typer.BadParameter("The tests pass without the package, so they do not import the copy.")

    def catches(self, fault: Fault) -> Outcome:
        """Run the tests of a fault with the fault applied."""
        started, file = time.perf_counter(), file_of(fault, self._folder)
        passed = self._pass_with(file, file.read_text("utf-8").replace(fault.old, fault.new), fault.tests.split())
        return Outcome(fault.name, not passed, round(time.perf_counter() - started, 1))

    def _pass_with(self, file: Path, text: str, tests: Sequence[str]) -> bool:
        """Whether tests pass with another text of a file. Its time is restored too, which compiled files are for."""
        kept, times = file.read_bytes(), file.stat()
        file.write_text(text, "utf-8")
        try:
            return self._run(tests, PYTHONDONTWRITEBYTECODE="1")[0]
        finally:
            file.write_bytes(kept)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _run(self, tests: Sequence[str], **environment: str) -> tuple[bool, str]:
        """Return whether tests pass, and what pytest has printed. Tests that hang do not pass."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=MAX_SECONDS * len(tests))[0].decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            return False, "They hang."
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return process.returncode == 0, output


def file_of(fault: Fault, folder: Path) -> Path:
    """Return the file of the package that has a fault's old text.

    Raises:
        typer.BadParameter: no file has it, or it occurs several times.
    """
    found = [
        file
        for file in sorted((folder / PACKAGE).rglob("*.py"))
        for _ in range(file.read_text("utf-8").count(fault.old))
    ]
    if len(found) != 1:
        raise typer.BadParameter(f"The old text of the fault {fault.name!r} occurs {len(found)} times: {fault.old}")
    return found[0]


def outcomes(faults: Sequence[Fault], folder: Path, num_workers: int = 1) -> Iterable[Outcome]:
    """Yield the outcome of each fault, in copies of the checkout under `folder`.

    Raises:
        typer.BadParameter: a fault cannot be applied, or its tests fail without it.
    """
    tests = sorted({test for fault in faults for test in fault.tests.split()})
    copies = SimpleQueue[Checkout]()
    for number in range(num_workers):
        copies.put(Checkout(folder / str(number)))

    def outcome(fault: Fault) -> Outcome:
        copy = copies.get()
        try:
            return copy.catches(fault)
        finally:
            copies.put(copy)

    for fault in faults:
        file_of(fault, ROOT)
    first = copies.get()
    first.check(tests)
    copies.put(first)
    with ThreadPoolExecutor(num_workers) as executor:
        yield from executor.map(outcome, faults)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Name of a fault; can be repeated.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of copies that are tested concurrently.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the outcomes to this file.")] = None,
) -> None:
    """Apply small faults to a copy of the checkout, one at a time, and print those that no test catches."""
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in only or () if name not in known]:
        raise typer.BadParameter(f"There is no fault {unknown[0]!r}. Known: {', '.join(known)}.")
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for outcome in outcomes([known[name] for name in only or known], Path(folder), workers):
            found.append(outcome)
            print(
                f"{outcome.name:<20} {'caught' if outcome.caught else 'MISSED':<7} {outcome.seconds:6.1f} s", flush=True
            )
    missed = [outcome.name for outcome in found if not outcome.caught]
    print(f"{len(found) - len(missed)} of {len(found)} faults are caught. Missed: {', '.join(missed) or 'none'}.")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(outcome) for outcome in found], indent=1) + "\n", "utf-8")
