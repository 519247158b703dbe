"""`python -m evals.bench`: what it compares, stores and refuses. No test here checks how fast anything is."""

import asyncio
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomlkit
from commands import bench, stepspec
from typer.testing import CliRunner

from evals.bench import loads, on_vllm
from evals.bench.__main__ import FOLDER, app, summaries
from evals.bench.conversation import Conversations, at_context
from evals.bench.documents import measured_block, speeds_block
from evals.bench.engines import PLAIN, WARM_UP, Contender, Engines, Written, instructions, measure
from evals.bench.engines import compare as compare_engines
from evals.bench.exactness import MIN_P, Exactnesses, Parted, homogeneity
from evals.bench.gpu_probe import SECTIONS
from evals.bench.graders import FORMS, LIBRARIES, Item, graders_block, tallies
from evals.bench.loads import Loads, loads_block
from evals.bench.overhead import Overheads
from evals.bench.plots import speed_by_context
from evals.bench.published import PublishedProcedure
from evals.bench.same_texts import ask, compare
from evals.bench.size import code_lines
from evals.training.gsm_mini import load_split
from stepspec.api.models import load_pair
from stepspec.cli.program import run_program
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import ServerUsage
from stepspec.errors import UsageError
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.run import EvalProblem, load_benchmark
from stepspec.loop.policy import load_policy

SMALL = ("--shape", "mini,mini-draft", "--synthetic-acceptance", "0.8", "--tokens", "12", "--turns", "1")

MODULE = """\"\"\"Module.\"\"\"

WIDTH = 3  # why
'Of an attribute.'

TEXT = '''
in code'''


def work():
    '''Two
    lines.'''
    # a comment

    return [
        WIDTH,
    ]
"""


def test_every_command_is_listed_with_a_whole_sentence_and_runs_as_a_program() -> None:
    """The list comes from the text of the modules. Each of them is a command with annotations that typer can read."""
    found = summaries()
    assert {"documents", "overhead", "service.instant", "size", "gpu_probe"} <= found.keys()
    assert not {"speed", "service.client", "__main__"} & found.keys()
    assert [name for name, line in found.items() if not re.fullmatch(r"[A-Z].*[.]", line)] == []
    assert found.keys() >= {file.stem for file in FOLDER.glob("*.py") if "\ndef main(" in file.read_text()} - {
        "__main__"
    }
    for name in found:
        assert CliRunner().invoke(app, [name, "--help"], catch_exceptions=False).exit_code == 0


def test_the_probe_of_a_gpu_runs_on_a_cpu_and_stores_each_section(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    done = CliRunner().invoke(app, ["gpu_probe", "--cpu", "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text("utf-8"))
    assert found.keys() >= SECTIONS.keys()
    assert [name for name in SECTIONS if "error" in found[name]] == []
    assert found["rounds"]["context 100, drafted 4"]["wall_ms"] > 0
    assert found["engines"]["accepted 0.8, drafted 4, tokens/s"] > 0
    refused = CliRunner().invoke(app, ["gpu_probe", "round", "--cpu"])
    assert "Did you mean 'rounds'?" in str(refused.exception)


def test_graders_are_compared_on_the_same_lists_and_those_that_are_not_installed_are_named(tmp_path: Path) -> None:
    case = {"grader": "number", "gold": "18", "text": "#### 18", "correct": True, "arguable": False}
    lists: dict[str, list[dict[str, Any]]] = {
        "cases": [case, {**case, "gold": "17", "correct": False}, {**case, "correct": False, "arguable": True}],
        "gsm8k": [{"question": "?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}],
        "math": [{"problem": "?", "answer": "x^2", "solution": r"It is $\boxed{x^2}$."}],
    }
    options, file = list[str | Path](), tmp_path / "graders.json"
    for name, rows in lists.items():
        written = tmp_path / f"{name}.jsonl"
        written.write_text("\n".join(map(json.dumps, rows)))
        options += [f"--{name}", written]
    done = bench("graders", *options, "--json", file)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["sha256"].keys() == lists.keys()
    graders = {each["grader"].partition(" ")[0] for each in found["tallies"]}
    assert len(graders) == len(LIBRARIES) - len(found["missing"])
    assert graders >= {"stepspec", "math-verify"}, "these two are installed for evaluations"
    own = {each["list_name"]: each for each in found["tallies"] if each["grader"] == "stepspec grade"}
    assert len(own) == len(FORMS) + 3
    assert [own["cases"][name] for name in ("correct", "incorrect", "arguable", "judged_otherwise")] == [1, 1, 1, 1]
    assert sum(each["rejected"] + each["accepted"] + each["raised"] for each in own.values()) == 0
    block = graders_block(file)
    assert "| cases: accepted, of 1 incorrect | 0 |" in block
    assert all(name in block for name in found["missing"])


def test_a_grader_that_raises_has_not_accepted() -> None:
    def scorer(item: Item) -> dict[str, bool]:
        return {"own": not 1 / int(item.gold)}

    items = [Item("list", gold, "", "", is_correct=correct) for gold in "01" for correct in (True, False)]
    (found,) = tallies("number", items, scorer)
    assert (found.raised, found.rejected, found.accepted) == (2, 2, 0)


def test_code_lines_have_no_comments_and_no_docstrings_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_lines(MODULE) == 7
    monkeypatch.setattr("evals.bench.size.ROOTS", ("evals",))
    found = CliRunner().invoke(app, ["size"], catch_exceptions=False).output
    assert {"evals/training", "evals/bench", "evals, all"} <= {*re.findall(r"[\w/]+(?:, all)?", found)}


@pytest.fixture
def _few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.bench.engine.PROMPTS_PER_PLACE", 2)


@pytest.mark.usefixtures("_few_prompts")
def test_every_drafter_is_compared_with_plain_decoding_and_with_transformers(tmp_path: Path) -> None:
    done = bench("engine", *SMALL, "--batch", "1", "--batch", "2", "--json", tmp_path / "new" / "figures.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("synthetic") == 2, "every table is marked as synthetic"
    report = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert report["synthetic"]
    alone, together = report["results"]
    names = [each["name"] for each in alone["contenders"]]
    assert names[0] == "plain"
    assert {"draft-model", "draft-model (4 drafted)", "prompt-lookup", "suffix", "transformers"} <= {*names}
    contenders = [*alone["contenders"], *together["contenders"]]
    assert not any("assisted" in each["name"] for each in contenders), "it would accept nothing of a random draft"
    assert together["contenders"][1]["name"] == "plain, 1 at once"
    assert all(each["over_alone"] > 0 for each in together["contenders"])
    drafted = next(each for each in alone["contenders"] if each["name"] == "draft-model (4 drafted)")
    for figure in ("drafting_cost", "verifying_cost", "ideal", "share_of_ideal", "over_plain"):
        assert drafted[figure] > 0
    assert 0.4 < drafted["acceptance"] <= 1


@pytest.mark.usefixtures("_few_prompts")
def test_on_the_embedded_pair_all_contenders_write_the_same(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = bench("engine", "--batch", "1", "--tokens", "12", "--turns", "2", "--drafter", "draft-model", "--json", file)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    contenders = report["results"][0]["contenders"]
    assert all(each["differing"] == 0 for each in contenders)
    assert sum(each["name"].startswith("transformers assisted") for each in contenders) == 3
    assert all(each["over_assisted"] > 0 for each in contenders)
    assert not report["synthetic"]
    assert report["engine"]["name"] == "embedded target"
    text = speeds_block(file)
    left_out = {"draft-model (4 drafted)", "transformers assisted (4 drafted)", "transformers assisted (defaults)"}
    assert left_out < {each["name"] for each in contenders}
    assert all((f"| {each['name']} |" in text) == (each["name"] not in left_out) for each in contenders)
    assert "medians of 2 paired turns" in text


def test_a_step_reads_no_text_again_at_any_context_length(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    lengths = ("--length", "100", "--length", "1500")
    done = bench("context", "--shape", "mini-draft", *lengths, "--turns", "3", "--json", file)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    assert [each["context"] for each in results] == [100, 1500]
    assert all(each["read_again"] <= 2 for each in results), "each of two calls may read the last id of the text again"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("engine", "--shape", "9b"), "9b"),
        (("engine", "--shape", "8b,0.6b"), "--synthetic-acceptance"),
        (("engine", "--shape", "mini,mini,mini", "--synthetic-acceptance", "0.5"), "3 shapes"),
        (("engine", "--shape", "mini", "--target", "torch:x"), "--shape makes its own models"),
        (("engine", "--draft", "torch:x"), "without a target"),
        (("engine", "--target", "http://x"), "torch:FOLDER_OR_NAME"),
        (("engine", "--drafter", "sufix"), "suffix"),
        (("engine", "--dtype", "int3"), "float32"),
        (("context", "--shape", "mini", "--target", "torch:x"), "--shape makes its own models"),
        (("on_vllm", "rows.jsonl", "--vllm", "nowhere"), "Cannot run nowhere"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_in_a_sentence(
    arguments: tuple[str, ...], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit, match="2"):
        run_program(app, "bench")
    done = capsys.readouterr()
    assert done.out == ""
    assert complaint in done.err
    assert done.err.startswith("stepspec: ")
    assert done.err.count("\n") == 1


def test_the_controller_is_timed_apart_from_the_transport_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "controller.json"
    done = bench("controller", "--context", "100", "--context", "1000", "--concurrent", "2", "--json", file)
    assert done.returncode == 0, done.stderr
    short, long = json.loads(file.read_text())["results"]
    assert (short["context"], long["context"], short["concurrent"]) == (100, 1000, 2)
    assert short["steps"] == long["steps"] > 100
    for each in (short, long):
        assert all(each[figure] > 0 for figure in ("ms", "memory_bytes", "transport_ms"))
    assert long["transport_bytes"] > short["transport_bytes"], "a server receives the whole prompt"


def test_the_overhead_of_useless_drafts_is_measured(tmp_path: Path) -> None:
    """Nothing of a draft that never answers is in the text. Times of so few problems show nothing."""
    file, policy = tmp_path / "overhead.json", tmp_path / "impatient.toml"
    given = load_policy("two-level")[0].model_dump(mode="json", exclude_none=True)
    given["step"]["draft_deadline_s"] = 0.5  # before the target's speed is known, only this ends the wait for a draft
    policy.write_text(tomlkit.dumps(given))
    arguments = ("--policy", policy, "--kind", "random", "--kind", "stalling", "--limit", "2", "--concurrency", "2")
    done = bench("overhead", *arguments, "--json", file)
    assert done.returncode in (0, 1), done.stderr
    found = Overheads.model_validate_json(file.read_bytes())
    assert done.returncode == (not found.holds)
    random, stalling = found.results
    assert (random.kind, stalling.kind) == ("random", "stalling")
    assert stalling.from_draft == 0
    assert random.from_draft < 0.5
    assert stalling.ratio > 0
    assert stalling.ratio_ci is None, "from a single block of problems"
    assert "stalling" in done.stdout
    assert f"{policy} on gsm-mini, temperature 0; " in measured_block("overhead", file)
    refused = bench("overhead", "--kind", "stalled")
    assert refused.returncode == 2
    assert "Did you mean 'stalling'?" in refused.stderr
    refused = bench("overhead", "--policy", "target")
    assert refused.returncode == 2
    assert "'target' does not speculate on steps." in refused.stderr


def test_long_conversations_are_compared_by_the_length_of_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # a narrow table becomes a list
    file = tmp_path / "conversation.json"
    policies = ("--policy", "target", "--policy", "two-level")
    done = bench("conversation", *policies, "--conversations", "1", "--context", "100", "--json", file)
    assert done.returncode == 0, done.stderr
    found = Conversations.model_validate_json(file.read_bytes())
    assert [(each.policy, each.up_to) for each in found.results] == [("target", 500), ("two-level", 500)]
    assert [at_context(length) for length in (1, 500, 501, 4000, 4001)] == [0, 0, 1, 3, 4]
    target, ours = found.results
    assert (target.speedup, target.from_draft, target.steps_accepted) == (1.0, 0.0, None)
    assert target.questions == ours.questions
    assert ours.steps_accepted is not None
    assert "up to 500  two-level" in done.stdout
    assert "gsm-mini, 1 conversation of 100 tokens, temperature 0; target embedded target" in measured_block(
        "conversation", file
    )
    titles = re.findall("<title>(.*?)</title>", speed_by_context(found).image())
    assert titles == ["target, up to 500: 1.00×", f"two-level, up to 500: {ours.speedup:.2f}×"]
    refused = bench("conversation", "--context", "9000")
    assert refused.returncode == 2
    assert "leaves no room" in refused.stderr


def test_exact_policies_are_compared_with_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.bench.exactness.PERMUTATIONS", 999)
    file = tmp_path / "exact.json"
    done = bench("exactness", "--limit", "1", "--samples", "10", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    found = Exactnesses.model_validate_json(file.read_bytes())
    assert [each.policy for each in found.results] == ["token", "exact", "exact on every step"]
    assert found.results[0].from_draft == 0
    assert found.results[2].from_draft > 0
    parted = [Parted(problem=1, after="", difference=difference) for difference in (1e-5, 1e-3)]
    near, far = (found.results[0].model_copy(update={"parted": [each]}) for each in parted)
    assert near.holds
    assert not far.holds
    assert not near.model_copy(update={"parted": 4 * parted[:1]}).holds
    assert "every step" in done.stdout
    assert "gsm-mini, 10 sampled texts under each policy; " in measured_block("exact", file)


LLAMA_LOG = """0.00 I build_info: b1
0.00 I system_info: n_threads = 1 (n_threads_batch = 1) / 2 | CPU : SSE3 = 1 | AVX2 = 1 | SVE = 0 | AMX_INT8 = 1 | \n"""


def test_engines_take_turns_and_each_is_compared_with_itself_without_a_draft(tmp_path: Path) -> None:
    """The time in which an engine reads the prompt without a draft counts neither for it nor for its drafts."""
    calls = list[tuple[str, int, str]]()

    class Scripted:
        pid = os.getpid()

        def __init__(self, name: str) -> None:
            self.name = name

        def write(self, prompt: Sequence[int], max_tokens: int, drafted: str) -> Written:
            calls.append((self.name, max_tokens, drafted))
            return Written((*prompt, *range(max_tokens - 1)), 0, 0)

        def close(self) -> None: ...

    ours, other = Scripted("ours"), Scripted("other")
    contenders = [Contender("ours", "int8", drafted, ours) for drafted in (PLAIN, "4")]
    contenders += [Contender("other", "Q4", PLAIN, other)]
    measure(contenders, [[7], [8]], 3, lambda *_: None)
    plain, drafted = [("ours", 1, PLAIN), ("ours", 3, PLAIN)], [("ours", 3, "4")]
    others = [("other", 1, PLAIN), ("other", 3, PLAIN)]
    assert [count for _, count, _ in calls[:3]] == 3 * [WARM_UP]
    assert calls[3:] == [*plain, *drafted, *others, *drafted, *others, *plain]
    for contender, cpu_s, last in zip(contenders, (3.0, 2.0, 9.0), (2, 5, 2), strict=True):
        counts = (0, 0) if contender.drafted == PLAIN else (4, 3)
        contender.texts = [Written((1, 0, last), *counts, cpu_s, 2 * cpu_s)]
        contender.readings = [Written((1,), 0, 0, 1.0, 2.0)]
    rows = compare_engines(contenders)
    assert [(each.tokens, each.cpu_ms, each.wall_ms) for each in rows] == [
        (2, 1000, 2000),
        (2, 500, 1000),
        (2, 4000, 8000),
    ]
    assert [each.over_plain for each in rows] == [1, 2, 1]
    assert [(each.acceptance, each.differing) for each in rows] == [(None, 0), (0.75, 1), (None, 0)]
    about = conditions() | {
        "benchmark": "gsm-mini",
        "problems": 1,
        "max_tokens": 3,
        "llama_cpp": f"b11434, {instructions(LLAMA_LOG)}",
    }
    file = tmp_path / "qwen.json"
    file.write_text(Engines.model_validate({**about, "results": rows}).model_dump_json())
    block = measured_block("engines", file)
    assert "| ours | int8 | 4 | 1.0 | 2.00 | 75% | 1 of 1 |" in block
    assert "llama.cpp b11434;" in block
    assert instructions(LLAMA_LOG) == "SSE3, AVX2, AMX_INT8"


def test_samples_of_two_distributions_are_told_apart() -> None:
    same = homogeneity(30 * ["a", "b", "b"], 30 * ["b", "a", "b"])
    assert same == (0.0, 1.0)
    chi_square, p_value = homogeneity(40 * ["a", "b"], 40 * ["a", "b", "b"])
    assert p_value == pytest.approx(0.02, abs=0.015)
    assert chi_square == pytest.approx(5.56, abs=0.1)
    assert homogeneity(50 * ["a", "b"], 50 * ["a", "c"])[1] < MIN_P


def test_throughput_under_load_is_compared_with_token_level(tmp_path: Path) -> None:
    policies = [part for name in ("target", "two-level") for part in ("--policy", name)]
    done = stepspec("eval", "gsm-mini", "--limit", "2", *policies, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    loads.main(tmp_path / "run", tmp_path / "loads.json")
    found = Loads.model_validate_json((tmp_path / "loads.json").read_bytes()).results
    assert [each.policy for each in found] == ["target", "token", "two-level"]
    assert found[1].ratio == 1
    assert "| 1 | token |" in loads_block(tmp_path / "loads.json")
    with pytest.raises(UsageError):
        loads.main(tmp_path / "policies", tmp_path / "found.json")


DRAFTED = {"A is 2.": 9, "</think>": 9, "": 9, "B is 3.": 3, "The answer is \\boxed{4}.": 9}
"""Steps of a draft and their ratings."""


@pytest.mark.parametrize(
    ("steps", "text", "num_calls"),
    [
        (["A is 2.", "</think>", "</think>"], "A is 2.\n\n\n\n", 6),
        (["", "", "A is 2.", "The answer is \\boxed{4}."], "\n\n\n\nA is 2.\n\nThe answer is \\boxed{4}.", 8),
        (["B is 3.", "The answer is \\boxed{4}."], "C is 5.\n\nThe answer is \\boxed{4}.", 5),
        (["A is 2."] * 2 + ["B is 3."] * 2, "A is 2.\n\nA is 2.\n\nC is 5.\n\nC is 5.", 10),
    ],
)
def test_the_published_procedure_ends_as_its_script_does(steps: list[str], text: str, num_calls: int) -> None:
    """With a box, or with two equal steps from the third one on; a step of nothing but the tag is empty."""
    remaining, calls = iter(steps), list[dict[str, Any]]()

    class Scripted(PublishedProcedure):
        def _asked(self, address: Address, fields: dict[str, Any]) -> Any:
            calls.append(fields)
            if "logprobs" in fields:
                step = fields["messages"][1]["content"].removeprefix("<think>").rpartition("\n\n")[2]
                return SimpleNamespace(text=str(DRAFTED[step]))
            text = next(remaining) if address is self.draft else "C is 5."
            return SimpleNamespace(text=text, usage=ServerUsage(completion_tokens=4))

    procedure = Scripted(Address("http://127.0.0.1:1/v1"), Address("http://127.0.0.1:2/v1"))
    assert procedure.solve("How many?", 99) == (text, 4 * len(steps))
    assert len(calls) == num_calls
    assert [call["max_tokens"] for call in calls if "stop" in call][-1] <= 99 - 4 * (len(steps) - 1)
    procedure.close()


def test_servers_take_turns_by_blocks_of_problems_and_both_kinds_get_all() -> None:
    problems = [EvalProblem(str(number), "", "1", None) for number in range(5)]
    found = [(kind, int(problem.id)) for kind, _, problem in on_vllm.turns(problems, 2)]
    starts = [kind for kind, _ in itertools.groupby(found, key=lambda turn: turn[0])]
    assert starts == ["plain", "drafting", "plain", "drafting"], "one kind starts for a block, but for the first"
    assert sorted(found) == [(kind, number) for kind in ("drafting", "plain") for number in range(5)]
    assert [number for _, number in found] == [0, 1, 0, 1, 2, 3, 2, 3, 4, 4]


def test_procedures_on_vllm_are_compared_on_the_problems_that_all_have(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    plan = on_vllm.Plan(tmp_path, tmp_path, 8, 64, load_benchmark("gsm8k")[1])
    about = {"num_drafted": 8, "max_tokens": 64, "cpu_s": None, "requests": 2, "bytes_sent": 2048, "bytes_received": 0}
    rows = [
        on_vllm.Row.model_validate(
            {**about, "problem": str(problem), "procedure": name, "status": "correct" if place else "wrong"}
            | {"seconds": 8.0 / (1 + place), "tokens": 50, "rounds": 5 * (place > 1), "drafted": 40}
            | {"accepted": 20 + 5 * place, "relaxed": 5 * (name == "relaxed")}
        )
        for problem in range(3)
        for place, name in enumerate(on_vllm.PROCEDURES)
        if (problem, name) != (2, "relaxed")
    ]
    other = rows[0].model_copy(update={"max_tokens": 32})
    lines = [row.model_dump_json() + "\n" for row in (other, *rows)]
    file.write_text("".join(lines) + lines[-1][:30])
    found = on_vllm.compared(plan.stored(file))
    assert [each.procedure for each in found] == on_vllm.PROCEDURES
    assert [each.over_published for each in found] == [1, 2, 3, 4, 5]
    assert [each.per_round for each in found] == [None, None, 7, 8, 9]
    assert [each.relaxed for each in found] == [0, 0, 0, 0.1, 0]
    assert [each.difference for each in found] == [-1, 0, 0, 0, 0]
    assert found[3].rounds_over_engine == pytest.approx(8 / 7)
    settings = {"pair": "qwen", "benchmark": "gsm8k", "max_tokens": 64, "num_drafted": 8, "results": found}
    shown = on_vllm.OnVllm.model_validate({**conditions(), **settings})
    assert {len(row) for row in on_vllm.rows_of(shown)} == {len(on_vllm.HEADS)}


def test_texts_that_part_where_nothing_is_close_are_counted(tmp_path: Path) -> None:
    async def run() -> None:
        questions = [problem.question for problem in itertools.islice(load_split("calibration"), 2)]
        pair = load_pair()
        models = [pair.target, pair.draft]
        first = await ask(pair, ["target", "token"], questions)
        same = await compare(models, first, first, {})
        assert {policy: each[:3] for policy, each in same.items()} == {"target": (2, 0, 0), "token": (2, 0, 0)}
        other = json.loads(json.dumps(first))
        other["token"][1]["text"] = first["token"][1]["text"][:30] + " and" + first["token"][1]["text"][30:]
        assert (await compare(models, first, other, {}))["token"][:3] == (2, 1, 1)
        for texts, step, score in ((first, "One.", -1.99), (other, "Two.", -2.5)):
            texts["token"][1]["steps"][0] = [step, {"likelihood.min": score}]
        for threshold, untied in ((-2.0, 0), (-1.0, 1)):
            assert (await compare(models, first, other, {"token": threshold}))["token"][:3] == (2, 1, untied)
        await pair.aclose()

    asyncio.run(run())


def test_other_kinds_of_problems_are_told_apart(tmp_path: Path) -> None:
    data, file = FOLDER.parent / "data", tmp_path / "kinds.json"
    options = ("--pair", "embedded", "--benchmark", "gsm-mini", "--known", data / "gsm-mini-calibration.jsonl.gz")
    done = bench(
        "kinds",
        *options,
        "--limit",
        "30",
        f"test={data / 'gsm-mini-test.jsonl.gz'}",
        f"typed={data / 'typed.jsonl'}",
        "--json",
        file,
    )
    assert done.returncode == 0, done.stderr
    test, typed = json.loads(file.read_text())["kinds"]
    assert (test["name"], test["num_problems"], typed["below"]) == ("test", 30, 1.0)
    assert test["below"] <= 0.1
    assert "Problems are NAME=FILE, got nothing." in bench("kinds", *options, "nothing").stderr
