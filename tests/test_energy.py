"""Energy counters are read from the drivers that provide them, and a counter that wraps around loses nothing."""

from pathlib import Path

import pytest

from stepspec.evaluation.energy import EnergyCounter, EnergyMeter, package_counters


def zone(folder: Path, name: str, microjoules: int) -> Path:
    """Create the files of a RAPL zone as the kernel shows them."""
    (folder / name).mkdir(parents=True)
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")
    (folder / name / "max_energy_range_uj").write_text("10000000\n")
    return folder / name


def test_packages_are_read_and_their_parts_are_not_counted_twice(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", 1_000_000)
    zone(tmp_path, "intel-rapl:1", 3_000_000)
    zone(tmp_path, "intel-rapl:0:0", 500_000)
    meter = EnergyMeter(package_counters(tmp_path))
    before = meter.read()
    assert list(before) == ["intel-rapl:0", "intel-rapl:1"]
    (first / "energy_uj").write_text("2500000\n")
    assert meter.drawn(before, meter.read()) == pytest.approx(1.5)


def test_a_counter_that_wrapped_around_loses_nothing(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", 9_000_000)
    meter = EnergyMeter(package_counters(tmp_path))
    before = meter.read()
    (package / "energy_uj").write_text("500000\n")
    assert meter.drawn(before, meter.read()) == pytest.approx(1.5)


def test_a_zone_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    (zone(tmp_path, "intel-rapl:0", 1) / "energy_uj").unlink()
    (zone(tmp_path, "intel-rapl:1", 1) / "max_energy_range_uj").write_text("a lot")
    assert package_counters(tmp_path) == []


def test_without_counters_no_energy_is_reported() -> None:
    meter = EnergyMeter([])
    assert meter.drawn(meter.read(), meter.read()) is None
    assert EnergyMeter([EnergyCounter("still", lambda: 4.0)]).drawn({"still": 4.0}, {"still": 4.0}) == 0.0


def test_the_counters_of_this_machine_can_be_read() -> None:
    meter = EnergyMeter()
    before = meter.read()
    joules = meter.drawn(before, meter.read())
    assert joules is None or joules >= 0
