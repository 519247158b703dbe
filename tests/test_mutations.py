"""The faults that show what tests see: each can be applied, one is, and tests that would see none are refused."""

from pathlib import Path

import pytest
import typer

from evals.bench.mutations import FAULTS, PACKAGE, ROOT, Checkout, Fault, file_of


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout"))


def test_every_fault_has_one_place_in_the_package_and_tests_that_exist() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 50
    package = "\0".join(file.read_text("utf-8") for file in (ROOT / PACKAGE).rglob("*.py"))
    counts = {fault.old: package.count(fault.old) for fault in FAULTS}
    assert {old: count for old, count in counts.items() if count != 1} == {}
    for test in {test for fault in FAULTS for test in fault.tests.split()}:
        name, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / "tests" / name).read_text("utf-8"), test


def test_a_fault_is_caught_and_a_text_that_means_the_same_is_not(copy: Checkout) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "wilson")
    fault = fault._replace(tests=f"{fault.tests}::test_wilson_matches_the_values_published_by_newcombe")
    assert copy.catches(fault).caught
    assert not copy.catches(fault._replace(new=f"(z * z) / {fault.old.partition(' / ')[2]}")).caught


def test_tests_that_do_not_import_the_copy_are_refused(copy: Checkout) -> None:
    with pytest.raises(typer.BadParameter, match="do not import the copy"):
        copy.check(["test_mutations.py::test_a_text_that_occurs_several_times_is_no_fault"])


def test_a_text_that_occurs_several_times_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "one.py").write_text("a = b + b\n")
    with pytest.raises(typer.BadParameter, match="occurs 2 times"):
        file_of(Fault("twice", "b", "c", ""), tmp_path)
