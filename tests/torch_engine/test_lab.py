"""`python -m evals.bench lab`: what its rules keep, refuse and write again, and what its report derives from that."""

import gzip
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import bench
from tiny_models import (
    llama_config,
    make_model,
    make_network,
    make_tokenizer,
    noisy_copy,
    random_ids,
    slow_greedy,
    slow_logits,
)

from evals.bench.certification import lab_population
from evals.bench.lab import (
    BASELINE,
    COSTS,
    Figures,
    Lockstep,
    Position,
    Row,
    Setting,
    Text,
    all_figures,
    chosen_settings,
    fronts,
    num_rounds,
    positions,
)
from evals.bench.rows import finished_rows, stored_rows
from stepspec.errors import UsageError
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.run.problem_reader import EvalProblem

NETWORK = make_network(llama_config())
NAMES = ("the", " a", " 7", " Ann", "\n\n", "<end>")
THE, A, SEVEN, ANN, BLANK, END = range(6)


class Words:
    """A tokenizer of six words."""

    end_ids = frozenset({END})

    def piece(self, token: int) -> str:
        return NAMES[token]


def text(temperature: float = 0.0, **how: Any) -> Text:
    words: Any = Words()
    return Text(EvalProblem("1", "", "7"), "a", Setting(**how), temperature, [THE, THE], words)


def at(drafted: int, favorite: int | None = None, nats: float = 0.0, **known: Any) -> Position:
    """Return a position at which the exact rule takes the favorite."""
    favorite = drafted if favorite is None else favorite
    known = {"logprob": -nats, "entropy": 1.0, "top_entropy": 1.0, "certainty": 1.0} | known
    return Position(drafted, drafted == favorite, favorite, favorite, favorite, nats, **known)


def written(own: Text, *script: Position) -> tuple[str, list[int]]:
    for position in script:
        own.advance(position)
    return own.trace, own.out


def lockstep() -> Lockstep:
    return Lockstep([make_model(NETWORK), make_model(noisy_copy(NETWORK, 0.1))], max_texts=2, length=64)


def tiny_texts(**how: Any) -> list[Text]:
    """Return texts after prompts of different lengths, twice after each."""
    prompts = [random_ids(5 + 3 * seed, seed) for seed in range(3)]
    return [replace(text(**how), tokenizer=make_tokenizer(), prompt=prompt) for prompt in prompts for _ in range(2)]


def test_the_exact_rule_writes_the_greedy_texts_of_the_target() -> None:
    done = [*lockstep().write(iter(tiny_texts(rule="exact", num_drafted=3)), 20)]
    assert len(done) == 6
    assert all(each.out == slow_greedy(NETWORK, each.prompt, 20) for each in done)
    assert set("axAX") <= set("".join(each.trace for each in done)), "the draft is sometimes right"


def test_tokens_behind_a_dropped_one_leave_no_trace_in_the_cache() -> None:
    """Every token but the relaxed ones is the target's favorite after the text that is left."""
    done = [*lockstep().write(iter(tiny_texts(num_drafted=6, window=2)), 20)]
    assert any(len(each.trace) > len(each.out) for each in done), "no token was dropped"
    assert any(each.relaxed for each in done)
    for each in done:
        own = slow_logits(NETWORK, [*each.prompt, *each.out])[len(each.prompt) - 1 : -1].argmax(1).tolist()
        others = {place for place, (found, best) in enumerate(zip(each.out, own, strict=True)) if found != best}
        assert others == {place for place, _, _ in each.relaxed}


def test_a_round_ends_with_the_targets_token() -> None:
    own = text(share=0.1, num_drafted=2)
    script = at(A), at(A, THE, 1), at(A, THE, 1), at(A, THE, 3), at(A), at(A), at(A, THE, 3)
    assert written(own, *script) == ("arRxaaX", [A, A, THE, THE, A, A, THE])


@pytest.mark.parametrize(
    ("how", "position", "trace"),
    [
        ({"share": 0.1}, at(A, THE, 2.2), "r"),
        ({"share": 0.1}, at(A, THE, 2.4), "x"),
        ({"share": 0.1}, at(SEVEN, THE, 1), "r"),
        ({"share": 0.1, "exact": ["digits"]}, at(SEVEN, THE, 1), "x"),
        ({"share": 0.1, "exact": ["digits"]}, at(THE, SEVEN, 1), "x"),
        ({"share": 0.1, "exact": ["digits"]}, at(ANN, THE, 1), "r"),
        ({"share": 0.1, "exact": ["digits", "names"]}, at(ANN, THE, 1), "x"),
        ({"share": 0.1}, at(END, THE, 0.1), "x"),
        ({"share": 0.1, "certainty": 1}, at(A, THE, 1.2, certainty=0.5), "x"),
        ({"min_logprob": -2}, at(A, THE, 1.9), "r"),
        ({"min_logprob": -2}, at(A, THE, 2.1), "x"),
        ({"tolerance": 0.09}, at(A, THE, 2, entropy=0.8), "r"),
        ({"tolerance": 0.09}, at(A, THE, 2.1, entropy=0.1), "r"),
        ({"tolerance": 0.09}, at(A, THE, 2.5, entropy=0.1), "x"),
        ({"entropy": 0.3}, at(A, THE, 2, top_entropy=0.2), "x"),
        ({"rule": "exact"}, at(A, THE, 0.1), "x"),
    ],
)
def test_a_token_is_relaxed_if_all_conditions_hold(how: dict[str, Any], position: Position, trace: str) -> None:
    assert written(text(**how), position)[0] == trace


def test_thresholds_depend_on_the_text_so_far() -> None:
    surprised = at(A, THE, 3), at(A), at(A, THE, 1)  # on average 1.5 nats below the favorite
    assert written(text(share=0.3), *surprised)[0] == "xar"
    assert written(text(share=0.3, surprise=1), *surprised)[0] == "xax"
    second_step = at(BLANK), at(A, THE, 1)
    assert written(text(share=0.3, per_step=0.8), *second_step)[0] == "ax"
    assert written(text(share=0.5, per_step=1.5), *second_step)[0] == "ar"


def test_a_relaxed_token_needs_others_behind_it_that_agree() -> None:
    how = {"window": 2, "num_drafted": 5}
    assert written(text(**how), at(A, THE, 1), at(A), at(A), at(A, ANN, 1)) == ("raax", [A, A, A, ANN])
    assert written(text(**how), at(A), at(A, THE, 1), at(A), at(A, ANN, 1)) == ("arax", [A, THE])


def test_a_step_has_a_budget() -> None:
    script = at(A, THE, 1), at(A, THE, 1), at(BLANK), at(A, THE, 1)
    assert written(text(budget=1.5), *script) == ("rxar", [A, THE, BLANK, A])


def test_a_step_above_its_bound_is_written_again_under_the_exact_rule() -> None:
    how, script = {"rewrite": 1.5}, (at(A), at(BLANK), at(A), at(A, THE, 1), at(A, ANN, 1), at(BLANK))
    again = at(A, THE, 0.1), at(BLANK), at(A, THE, 1)
    assert written(text(**how), *script) == ("aaarraw", [A, BLANK, A, THE]), "from its first relaxed token"
    assert written(text(**how), *script, *again) == ("aaarrawxar", [A, BLANK, A, THE, THE, BLANK, A])
    assert written(text(0.6, **how), *script) == ("aaarraw", [A, BLANK]), "as a whole"


@pytest.mark.parametrize(
    ("temperature", "script", "answer"),
    [
        (0.0, [at(A, THE, 1), at(BLANK), at(A), at(A, THE, 1), at(END)], (3, 5)),
        (0.6, [at(A, THE, 1), at(BLANK), at(A), at(A, THE, 1), at(END)], (2, 5)),
        (0.0, [at(A, THE, 1), at(BLANK), at(A), at(END)], (4, 4)),
    ],
)
def test_the_step_that_answers_is_written_again_from_its_first_relaxed_token_or_as_a_whole(
    temperature: float, script: list[Position], answer: tuple[int, int]
) -> None:
    own = text(temperature, share=0.1)
    written(own, *script)
    own.tokenizer.decode = lambda ids: "".join(map(own.tokenizer.piece, ids))
    with Grading("integer") as grading:
        assert own.row(grading).answer == answer


def test_above_temperature_0_the_exact_rule_keeps_the_distribution_of_the_target() -> None:
    """Over a grid of random numbers, whose cells the probabilities fill."""
    noise = torch.tensor([*itertools.product([(0.5 + cell) / 8 for cell in range(8)], repeat=3)], dtype=torch.float64)
    p, q = torch.tensor([0.25, 0.25, 0.5]), torch.tensor([0.5, 0.25, 0.25])
    target, draft = (each.log().expand(len(noise), 3) for each in (p, q))
    found = positions(target, draft, torch.ones(len(noise)), noise)
    for outcomes, distribution in (
        ([each.drafted for each in found], q),
        ([each.drafted if each.agrees else each.instead for each in found], p),
        ([each.following for each in found], p),
    ):
        assert torch.tensor(outcomes).bincount() / len(found) == pytest.approx(distribution)
    assert {(each.favorite, each.instead) for each in positions(target, draft, torch.zeros(len(noise)), noise)} == {
        (2, 2)
    }
    assert found[0].entropy == pytest.approx(-(p * p.log()).sum().item())


def row(problem: int, setting: str, trace: str, *, right: bool = True, **how: Any) -> Row:
    status, kept = (
        "correct" if right else "incorrect",
        [(place, 1.0) for place, kind in enumerate(trace) if kind == "r"],
    )
    fields: dict[str, Any] = {"problem": str(problem), "setting": setting, "temperature": 0.0, "status": status}
    return Row(**fields, how=Setting(**how), tokens=len(trace), trace=trace, relaxed=kept, text="")


def test_rounds_are_those_of_any_number_of_drafted_tokens() -> None:
    rows = [row(1, "a", "arxaaA"), row(2, "a", "aw")]
    assert [num_rounds(rows, number) for number in (1, 2, 8)] == [4 + 1, 2 + 1, 2 + 1]
    (again,) = (row(3, "a", "aarxaarxax").model_copy(update={"answer": (6, 8)}),)
    assert num_rounds([again], 8) == 3
    assert num_rounds([again], 8, 0.5) == 2 + 2 * 0.5 + 2 * 0.5, "two tokens again, and two behind them"


def test_the_report_compares_a_setting_with_the_target_on_the_same_problems() -> None:
    rows = [row(number, BASELINE, "aax" * 4, rule="target") for number in range(10)]
    rows += [row(number, "a", "arA" * 4, right=number > 1, num_drafted=2, window=1) for number in range(9)]
    rows += [row(number, "draft", "a" * 6, right=False, rule="draft") for number in range(9)]
    target, own, draft, exact = all_figures(rows)
    assert (target.correct, target.difference, target.per_round, target.speeds[0]) == (1.0, 0.0, None, (1.0, 0))
    assert (own.problems, own.correct, own.difference) == (9, pytest.approx(7 / 9), pytest.approx(-2 / 9))
    assert own.interval[0] < own.difference < own.interval[1]
    assert (own.relaxed, own.refused, own.per_round) == (pytest.approx(1 / 3), 0, 3)
    assert own.speeds == [(pytest.approx(3 / (1 + 2 * (c + r))), 2) for c, r in COSTS], "with a window, K is its own"
    assert draft.speeds == []
    assert (exact.setting, exact.problems, exact.per_round) == ("exact", 10, 3)
    assert exact.speeds[0] == (pytest.approx(3 / 1.12), 2)
    with pytest.raises(UsageError, match="no rows of the setting 'target'"):
        all_figures([row(1, "a", "a")])


def test_rows_are_a_population_for_simulated_certificates(tmp_path: Path) -> None:
    rows = [row(number, BASELINE, "aa") for number in range(5)]
    rows += [row(number, "a", "aa", right=number > 1) for number in range(4)]
    lines, file = [each.model_dump_json(exclude_defaults=True) + "\n" for each in rows], tmp_path / "rows.jsonl"
    file.write_text("".join(lines))
    assert lab_population(file).losses.tolist() == [[1, 1, 0, 0]]
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(before := gzip.compress(file.read_bytes()))
    assert lab_population(packed).losses.tolist() == [[1, 1, 0, 0]]
    assert packed.read_bytes() == before
    file.write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match="has other rows than"):
        lab_population(file)
    file.write_text(lines[-1])
    with pytest.raises(UsageError, match="no problem that finished under the target and another setting"):
        lab_population(file)


def test_a_front_has_what_no_other_setting_beats_in_speed_and_loss() -> None:
    fields: dict[str, Any] = {"temperature": 0.6, "problems": 9, "correct": 0.5, "interval": (-1, 1)}
    fields |= {"relaxed": 0.0, "refused": 0.0, "per_round": 1.0}
    points = {"slow": (1.0, 0.0), "good": (2.0, 0.0), "fast": (3.0, -0.1), "bad": (2.5, -0.2), "draft": (None, -0.5)}
    found = [
        Figures(setting=name, difference=loss, speeds=[(times, 4)] * len(COSTS) if times else [], **fields)
        for name, (times, loss) in points.items()
    ]
    first, *_ = fronts(found)
    assert first == "front at c = 0.06, r = 0: fast 3.00× (-10.0), good 2.00× (+0.0)"


def test_a_run_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    file, report = tmp_path / "rows.jsonl", tmp_path / "report.json"
    command = ["lab", "--pair", "embedded", "--benchmark", "gsm-mini", "--skip", "3", "--limit", "2", "--tokens", "24"]
    command += ["--settings", "target,ratio-0.1", "--temperature", "0", "--temperature", "0.6", "--rows"]
    assert (done := bench(*command, file)).returncode == 0, done.stderr
    before = {(each.problem, each.setting, each.temperature): each for each in stored_rows(file, Row)}
    assert len(before) == 8
    file.write_bytes(file.read_bytes()[:-9])
    assert (done := bench(*command, file)).returncode == 0, done.stderr
    after = stored_rows(file, Row)
    assert len(after) == 8
    assert {(each.problem, each.setting, each.temperature): each for each in after} == before
    assert (done := bench("lab", "--report", file, "--json", report)).returncode == 0, done.stderr
    assert report.exists()
    assert "front at c = 0.06" in done.stdout
    assert "Give --rows" in bench("lab").stderr


@pytest.mark.parametrize("content", ["one\ntwo", '{\n  "a": 1\n}', '{"a": 1}', '{"a": 1}\n'])
def test_a_file_without_rows_is_refused_and_stays_as_it_is(content: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(content)
    for read in (stored_rows, finished_rows):
        with pytest.raises(UsageError, match=r"notes\.txt has "):
            read(file, Row)
    assert file.read_text() == content


def test_only_a_run_that_goes_on_removes_an_incomplete_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    whole = row(1, "a", "aa").model_dump_json(exclude_defaults=True) + "\n"
    file.write_text(whole + whole[:9])
    assert len(finished_rows(file, Row)) == 1
    assert file.read_text() == whole + whole[:9]
    assert len(stored_rows(file, Row)) == 1
    assert file.read_text() == whole


def test_settings_are_chosen_by_name() -> None:
    assert [*chosen_settings("fly,target")] == ["fly", "target"]
    assert chosen_settings(None)[BASELINE] == Setting(rule="target")
    with pytest.raises(UsageError, match=r"ratio-0\.1"):
        chosen_settings("ratio-0.1x")
