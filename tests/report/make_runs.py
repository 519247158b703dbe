"""Make synthetic runs from seeded distributions, with the record types of real runs.

python tests/report/make_runs.py FOLDER [NUM_PROBLEMS [WORDS_PER_STEP]]
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from stepspec.evaluation.records import (
    Block,
    EngineRecord,
    ModelUsage,
    PolicyKind,
    PolicyRecord,
    ResultRow,
    RunRecord,
    StepRecord,
    TimeRecord,
    TokenRecord,
    Trace,
)
from stepspec.evaluation.runs import output_sha256

TEXT = (
    "so the number of each box then is what remains after she gives some away which leaves total cost per day "
    "we add both parts and multiply by how many there were because half of them went to his sister before lunch "
    "first let us find out wait that cannot be right check again dividing gives exactly the same amount therefore"
)
WORDS = TEXT.split()
SUBJECTS = ("algebra", "counting", "geometry")
HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script> $x_1$ {{ 7 * 7 }} ﷽'


@dataclass(frozen=True)
class Kind:
    """The simulated behavior of a policy."""

    kind: PolicyKind
    seconds_per_token: float
    skill: float = 0.0
    """Added to the probability of a correct answer."""
    strictness: float = 0.5
    """Step quality below which a step is rejected, between 0 and 1."""
    judge: str = ""
    salvages: bool = False


POLICIES = {
    "target": Kind("target", 0.010),
    "token": Kind("token", 0.0064),
    "draft": Kind("draft", 0.0024, skill=-0.3),
    "specreason": Kind("step", 0.0066, judge="rating.specreason"),
    "two-level": Kind("step", 0.0048, judge="likelihood.min", salvages=True),
    "stepspec-loose": Kind("step", 0.0038, judge="likelihood.min", strictness=0.25, salvages=True),
}


@dataclass
class MadeRun:
    """The records of a run."""

    run: RunRecord
    rows: list[ResultRow] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def write(self, folder: Path, *, traces: bool = True) -> Path:
        """Write the files of the run as an evaluation does."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(self.run.model_dump_json(indent=2), "utf-8")
        written: list[tuple[str, Sequence[ResultRow | Trace | Block]]] = [("rows", self.rows), ("blocks", self.blocks)]
        for name, records in [*written, *([("traces", self.traces)] if traces else [])]:
            lines = [record.model_dump_json() + "\n" for record in records]
            (folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")
        return folder


def make_run(
    num_problems: int = 40,
    *,
    seed: int = 0,
    concurrency: int = 1,
    num_repeats: int = 1,
    words_per_step: int = 14,
    policies: Sequence[str] = tuple(POLICIES),
    hostile: bool = False,
) -> MadeRun:
    """Return a run over made-up problems. With `hostile`, every text tries to break out of the page."""
    made = MadeRun(_conditions(num_problems, seed, concurrency, num_repeats, policies))
    for index in range(num_problems):
        for repeat in range(num_repeats):
            problem = _Problem(index, repeat, seed, words_per_step, HOSTILE if hostile else "")
            for policy in policies:
                row, trace = problem.solve(policy, POLICIES[policy], concurrency)
                made.rows.append(row)
                made.traces.append(trace)
    made.blocks.extend(_blocks(made.rows, policies, concurrency))
    return made


def _conditions(num_problems: int, seed: int, concurrency: int, num_repeats: int, policies: Sequence[str]) -> RunRecord:
    return RunRecord(
        benchmark="made-up",
        data_sha256="0" * 64,
        num_problems=num_problems,
        prompt_id="boxed",
        prompt_version="abc123",
        policies={
            name: PolicyRecord(text=f'summary = "{name} <b>&"\n', sha256="1" * 64, kind=POLICIES[name].kind)
            for name in policies
        },
        engines={
            "target": EngineRecord(name="big", weights="2" * 64, dtype="bfloat16", device="cuda:0"),
            "draft": EngineRecord(name="small", weights="3" * 64, dtype="bfloat16", device="cuda:0"),
        },
        pair="cafe",
        temperature=0.6,
        top_p=0.95,
        max_tokens=640,
        seed=seed,
        concurrency=concurrency,
        num_repeats=num_repeats,
        versions={"python": "3.11.7", "stepspec": "0.1.0"},
        commit="0123456789" * 4,
        hardware={"cpu": "A Processor", "cores": 2, "memory_bytes": 8 * 2**30},
        started="2030-01-01T00:00:00+00:00",
    )


class _Problem:
    """A problem in one repeat. All repeats share the question but not the generated text."""

    def __init__(self, index: int, repeat: int, seed: int, words_per_step: int, hostile: str) -> None:
        self.name, self.repeat, self.hostile = f"made-{index:04}", repeat, hostile
        self.words_per_step = words_per_step
        self.random = Random(f"{seed} {index}")
        self.level = 1 + index % 5
        self.gold = str(self.random.randint(2, 999))
        self.question = f"Problem {index}: {self._words(24)}? {hostile}".strip()
        self.num_steps = 3 + self.level + self.random.randint(0, 4)
        self.ease = 0.99 - 0.05 * self.level + self.random.gauss(0, 0.03)
        self.random = Random(f"{seed} {index} {repeat}")
        self.target_steps = [self._step("target", [(1.0, {})])[0] for _ in range(self.num_steps)]

    def _words(self, count: int) -> str:
        words: list[str] = self.random.choices(WORDS, k=count)
        words[count // 2] = f"{self.random.randint(2, 99)} × {self.random.randint(2, 99)}"
        return " ".join(words)

    def _step(self, origin: str, verdicts: list[tuple[float, dict[str, float | None]]]) -> tuple[StepRecord, int]:
        num_words = max(4, round(self.random.gauss(self.words_per_step, 3)))
        num_tokens = round(num_words * 1.3)
        share, scores = verdicts[0]
        from_draft = {"draft": num_tokens, "target": 0}.get(origin, round(share * num_tokens))
        text = f"{self._words(num_words).capitalize()}. {self.hostile}\n\n"
        step = StepRecord.model_validate(
            {"origin": origin, "num_tokens": num_tokens, "num_from_draft": from_draft, "scores": scores, "text": text}
        )
        return step, num_tokens

    def solve(self, name: str, kind: Kind, concurrency: int) -> tuple[ResultRow, Trace]:
        """Return a result row and its trace. Each accepted weak step lowers the chance of a correct answer."""
        steps, chance, judged, refused, rejected = self._write(kind)
        if kind.kind in ("target", "token"):
            # Both policies write the same text, so they get the same number.
            lucky = Random(f"{self.name} {self.repeat}").random()
        else:
            lucky = self.random.random()
        correct = lucky < chance
        cut = not correct and self.random.random() < 0.15
        answer = self.gold if correct else None if cut else str(self.random.randint(2, 999))
        text = f"The answer is \\boxed{{{answer}}}. {self.hostile}" if answer else "So we have to"
        own = sum(step.num_tokens - step.num_from_draft for step in steps)
        accepted = sum(step.num_from_draft for step in steps)
        salvaged = sum(step.num_from_draft for step in steps if step.origin == "salvaged")
        regenerated, forced = (own if kind.kind == "step" else 0), 12 + (0 if kind.kind == "step" else own)
        committed = accepted + regenerated + forced
        tokens = TokenRecord(
            committed=committed,
            accepted=accepted,
            salvaged=salvaged,
            regenerated=regenerated,
            forced=forced,
            drafted=accepted + rejected,
            rejected=rejected,
        )
        wall_s = committed * kind.seconds_per_token * self.random.lognormvariate(0, 0.12) * (1 + 0.04 * concurrency)
        shares = {"target": (0, 1), "token": (0, 1), "draft": (1, 0), "step": (0.3, 0.45)}[kind.kind]
        time_s = TimeRecord(
            queue=0.02 * wall_s,
            controller=0.01 * wall_s,
            draft=0.97 * shares[0] * wall_s,
            target=0.97 * shares[1] * wall_s,
            judge=0.97 * (1 - sum(shares)) * wall_s,
        )
        row = ResultRow(
            problem=self.name,
            policy=name,
            repeat=self.repeat,
            prompt_id="boxed",
            prompt_version="abc123",
            level=self.level,
            subject=SUBJECTS[self.level % 3],
            status="correct" if correct else "no_answer" if cut else "incorrect",
            answer=answer,
            gold=self.gold,
            found_by=None if cut else "box",
            decided_by="number",
            why=None if correct else "No answer was found." if cut else f"{answer} is not {self.gold}.",
            finish_reason="length" if cut else "stop",
            output_sha256=output_sha256("".join(step.text or "" for step in steps), text),
            wall_s=wall_s,
            first_step_s=wall_s / (len(steps) + 1),
            first_answer_s=0.95 * wall_s,
            tokens=tokens,
            time_s=time_s,
            num_prompt_tokens=60,
            steps_judged=judged,
            steps_accepted=judged - refused,
            token_drafted=committed if kind.kind in ("token", "step") else 0,
            token_accepted=round(0.6 * committed) if kind.kind in ("token", "step") else 0,
            target_passes=0 if kind.kind == "draft" else committed // (4 if kind.kind != "target" else 1),
            steps=[step.model_copy(update={"text": None}) for step in steps],
        )
        trace = Trace(
            problem=self.name, policy=name, repeat=self.repeat, question=self.question, steps=steps, answer=text
        )
        return row, trace

    def _write(self, kind: Kind) -> tuple[list[StepRecord], float, int, int, int]:
        """Return the steps, the chance of a correct answer, the steps judged and rejected, and the tokens rejected."""
        if kind.kind in ("target", "token"):
            return self.target_steps, self.ease, 0, 0, 0
        if kind.kind == "draft":
            steps = [self._step("draft", [(1.0, {})])[0] for _ in range(self.num_steps)]
            return steps, self.ease + kind.skill, 0, 0, 0
        steps, chance, refused, rejected = [], self.ease + 0.02, 0, 0
        for index in range(self.num_steps):
            quality = self.random.betavariate(4 - 1.2 * index / self.num_steps, 1.2)
            score = round(9 * quality) if kind.judge.startswith("rating") else round(8 * quality - 8, 4)
            if quality >= kind.strictness:
                steps.append(self._step("draft", [(1.0, {kind.judge: score})])[0])
                chance -= 0.25 * max(0.0, 0.7 - quality)
                continue
            refused += 1
            share = self.random.random() if kind.salvages and self.random.random() < 0.6 else 0.0
            step, _ = self._step("salvaged" if share else "target", [(share, {kind.judge: score})])
            if step.origin == "salvaged" and not step.num_from_draft:
                step = step.model_copy(update={"origin": "target"})
            steps.append(step)
            rejected += max(2, step.num_tokens - step.num_from_draft)
        return steps, chance, len(steps), refused, rejected


def _blocks(rows: Sequence[ResultRow], policies: Sequence[str], concurrency: int, size: int = 10) -> Iterator[Block]:
    for policy in policies:
        own = [row for row in rows if row.policy == policy]
        for start in range(0, len(own), size):
            block = own[start : start + size]
            committed = sum(row.tokens.committed for row in block)
            wall_s = sum(row.wall_s for row in block) / min(concurrency, size)
            usage = ModelUsage(prompt_tokens=60 * len(block), cached_tokens=20 * len(block), generated_tokens=committed)
            yield Block(
                policy=policy,
                jobs=[(row.problem, row.repeat) for row in block],
                wall_s=wall_s,
                committed_tokens=committed,
                usage={"target": usage, "draft": usage},
            )


if __name__ == "__main__":
    make_run(
        int(sys.argv[2]) if len(sys.argv) > 2 else 40, words_per_step=int(sys.argv[3]) if len(sys.argv) > 3 else 14
    ).write(Path(sys.argv[1]))
