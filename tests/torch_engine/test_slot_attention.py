"""The kernel of passes by slot, in Triton's interpreter, against masks over whole slots."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import (
    EXPERTS,
    FAMILIES,
    WINDOWS,
    attend_slowly,
    generate_all,
    make_config,
    make_model,
    make_network,
    noisy_copy,
    random_ids,
    serving,
    slow_greedy,
    slow_logits,
)

from stepspec.engines.protocol import Drafting, Probe, TokenBuffer, Verify
from stepspec.engines.torch_engine.attention import SlotRows
from stepspec.engines.torch_engine.model import Branch, branch_columns

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the GPU"),
]

CAPACITY = 96


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other."""
    from stepspec.engines.torch_engine import slot_attention

    monkeypatch.setattr(slot_attention, "PROGRAMS", 8)


@st.composite
def passes(draw: st.DrawFn) -> tuple[SlotRows, int]:
    """Draw rows of one pass, of which some have branches, and the number of its ids with padding."""
    num_rows = draw(st.integers(1, 3))
    slots = draw(st.permutations(range(5)))[:num_rows]
    starts, lengths, tables = list[int](), list[int](), list[list[list[int]]]()
    for _ in range(num_rows):
        starts.append(draw(st.integers(0, 60)))
        lengths.append(length := draw(st.integers(0 if num_rows > 1 else 1, 9)))
        branches = draw(st.lists(st.builds(Branch, st.integers(0, 3), st.integers(0, 2)), max_size=2))
        inside = sum(branch.length + branch.hidden for branch in branches) < length
        tables.append([*branch_columns(length, length, branches if inside else [])])
    count, padding = sum(lengths), draw(st.integers(0, 3))
    columns = [[number for table in tables for number in table[part]] + [0] * padding for part in range(3)]
    firsts = [sum(lengths[:row]) for row in range(num_rows)]
    table = torch.tensor([slots, starts, firsts, lengths], dtype=torch.int32)
    longest = draw(st.integers(max(lengths), count + padding))
    return SlotRows(table, torch.tensor(columns, dtype=torch.int32), longest), count + padding


@settings(max_examples=30, deadline=None)
@given(
    drawn=passes(),
    heads=st.sampled_from([(4, 2), (2, 2), (6, 1)]),
    sizes=st.sampled_from([(8, 8), (16, 16), (12, 20)]),
    window=st.sampled_from([None, 2, 8, 40]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    scaling=st.sampled_from([None, 0.5]),
)
def test_the_kernel_attends_to_what_the_masks_show(
    drawn: tuple[SlotRows, int],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    scaling: float | None,
) -> None:
    from stepspec.engines.torch_engine.slot_attention import attend_in_slots

    (rows, count), generator = drawn, torch.Generator().manual_seed(0)
    if count == 0:
        return
    query = torch.randn(count, heads[0], sizes[0], generator=generator)
    keys, values = (torch.randn(5, heads[1], CAPACITY, size, generator=generator) for size in sizes)
    sinks = torch.randn(heads[0], generator=generator) if has_sinks else None
    options = {"scaling": scaling, "window": window, "softcap": softcap, "sinks": sinks}
    found = attend_in_slots(query, keys, values, rows, **options)
    torch.testing.assert_close(found, attend_slowly(query, keys, values, rows, **options), atol=2e-5, rtol=1e-4)


def test_the_kernels_compile_for_gpus_and_fit_their_shared_memory() -> None:
    """A GPU is not needed for that."""
    script = Path(__file__).with_name("compiled_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    most = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448}
    found = json.loads(done.stdout)
    assert len(found) == 8
    assert {name: size for name, size in found.items() if size > most[name[:5]]} == {}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("llama", "gpt-neox", "gemma2", "gpt-oss") else [pytest.mark.soak])
        for family in (*FAMILIES, *WINDOWS, *EXPERTS)
    ],
)
async def test_calls_and_judgments_by_the_kernel_equal_transformers(family: str) -> None:
    from stepspec.engines.torch_engine.slot_attention import attend_in_slots

    network = make_network(make_config(family))
    prompts, step = [random_ids(length, seed=length) for length in (3, 12)], random_ids(5, 7)
    models = [make_model(each) for each in (network, noisy_copy(network, 0.1))]
    for model in models:
        model.attend_in_slots_by(attend_in_slots)
    async with serving(*models) as engine:
        chunks = await generate_all(engine, prompts, 4, Drafting("draft-model", 2))
        probe = Probe(tuple(random_ids(3, 8)), (4, 9))
        verification = await engine.verify(Verify(TokenBuffer(prompts[1]), step, [probe, probe]))
    assert [list(chunk.ids) for chunk in chunks] == [slow_greedy(network, prompt, 4) for prompt in prompts]
    logits = slow_logits(network, [*prompts[1], *step, *probe.ids]).log_softmax(-1)
    expected = [float(logits[place, id]) for place, id in enumerate(step, len(prompts[1]) - 1)]
    assert verification.logprobs == pytest.approx(expected, abs=1e-3)
    for found in verification.probe_logprobs:
        assert found == pytest.approx(logits[-1, [4, 9]].tolist(), abs=1e-3)
