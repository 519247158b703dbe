"""The pair `smol`, built from its base: its texts are those of transformers, with and without a draft vocabulary."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stepspec import StepSpec, load_pair
from stepspec.api import pairs
from stepspec.api.scope import PairScope
from stepspec.chat.prompts import encode_request
from stepspec.engines.draft_vocabulary import FILE, load_draft_vocabulary
from stepspec.engines.hugging_face import load_tokenizer
from stepspec.engines.torch_engine import TorchEngine
from stepspec.errors import ModelError
from stepspec.evaluation.generators import gsm_plain as plain
from stepspec.evaluation.generators.gsm_mini import load_split
from stepspec.mini.scope import means
from stepspec.mini.smol.base import find_base

pytestmark = pytest.mark.anyio

QUESTIONS = (
    "Tom has 3 apples. Anna has 4 more apples than Tom. How many apples does Anna have?",
    "What is the capital of France?",
    "Tell me about volcanoes.",
)
NUM_NEW = 60
POLICY = Path(__file__).parents[2] / "evals" / "policies" / "smol" / "stepspec.toml"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build the pair in an empty cache folder."""
    try:
        find_base()
    except ModelError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def pair(cache: Path) -> Path:
    torch.set_num_threads(1)
    command = [sys.executable, "-m", "stepspec", "pair", "build", "smol"]
    built = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    folder = Path(built.stdout.strip())
    assert folder == pairs.find_pair("smol")
    return folder


async def answers(target: Path, draft: Path, policy: str) -> list[str]:
    async with StepSpec(f"torch:{target}", f"torch:{draft}", policy) as spec:
        results = await spec.batch(QUESTIONS, max_tokens=NUM_NEW)
    return [result.reasoning + result.answer for result in results]


@pytest.fixture(scope="module")
async def own_texts(pair: Path) -> list[str]:
    return await answers(pair / "target", pair / "draft", "target")


async def test_greedy_texts_are_those_of_transformers(pair: Path, own_texts: list[str]) -> None:
    """Compared as text, without the tags, in float32."""
    network = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    tokenizer = load_tokenizer(str(pair / "target"), network.config)
    expected = []
    for question in QUESTIONS:
        ids = torch.tensor([encode_request(tokenizer, question)])
        with torch.inference_mode():
            written = network.generate(ids, max_new_tokens=NUM_NEW, do_sample=False)[0, ids.shape[1] :].tolist()
        text = tokenizer.decode([id for id in written if id not in tokenizer.end_ids])
        expected.append(text.replace("</think>", ""))
    assert own_texts == expected


async def test_the_draft_vocabulary_changes_no_text_and_the_target_writes_tokens_outside_it(
    pair: Path, own_texts: list[str], tmp_path: Path
) -> None:
    whole = tmp_path / "draft"
    shutil.copytree(pair / "draft", whole, ignore=shutil.ignore_patterns(FILE))
    texts = [await answers(pair / "target", draft, "token") for draft in (pair / "draft", whole)]
    assert texts[0] == texts[1] == own_texts
    tokenizer = load_tokenizer(str(pair / "target"))
    vocabulary = load_draft_vocabulary(pair / "draft", 49_152)
    assert vocabulary is not None
    assert set(tokenizer.encode("".join(texts[0]))) - set(vocabulary), "the texts need no token outside it"


async def test_the_pair_is_found_by_name_and_answers(pair: Path) -> None:
    loaded = load_pair(pair="smol")
    async with StepSpec(pair=loaded, policy=str(POLICY)) as spec:
        result = await spec.generate(QUESTIONS[0])
    assert "\\boxed{7}" in result.answer
    assert result.note is None
    await loaded.aclose()


async def test_questions_unlike_its_data_get_a_note_and_its_own_do_not(pair: Path) -> None:
    """The base has read much, code and some languages too, so only nonsense and other languages are unlikely."""
    engine, scope = TorchEngine.load(str(pair / "target")), PairScope.load(pair)
    learned = [each.question for each in itertools.islice(plain.load_split("test"), 70)]
    learned += [each.question for each in itertools.islice(load_split("test"), 30)]
    strange = ["qpz vnh wok xrr jtu bzz", "Wie spät ist es?", "Die Katze sitzt auf dem Dach und schläft."]
    for questions, share in ((learned, 0.0), (strange, 1.0)):
        found = [mean < scope.least_logprob for mean in await means(engine, questions)]
        assert sum(found) / len(found) == share, found
    await engine.aclose()


async def test_every_preset_answers(pair: Path) -> None:
    loaded = load_pair(pair="smol", judge_names=["reward"])
    for policy in ("specreason", "rsd", "lookahead", "glimprouter", "speculative-thinking"):
        result = await StepSpec(pair=loaded, policy=policy).generate(QUESTIONS[0], max_tokens=80)
        result.counts.check()
        assert result.steps
    await loaded.aclose()


def test_every_file_of_the_pair_has_its_card_and_the_weights_fit(pair: Path) -> None:
    for role in ("target", "draft", "reward"):
        assert (pair / role / "README.md").read_text("utf-8") == (pairs.SMOL / "README.md").read_text("utf-8")
    assert sum(file.stat().st_size for file in pairs.SMOL_WEIGHTS.iterdir()) <= 40_000_000
