"""Joules and shares of use, from counters that a test has written."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from coterie.parallel.meters import Busy, Energy


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def ticks(user: int, idle: int, steal: int = 0) -> str:
    """As Linux writes it: user nice system idle iowait irq softirq steal guest guest_nice."""
    return f"cpu  {user} 10 20 {idle} 5 1 4 {steal} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"


def test_cores_in_use_since_the_last_call(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text(ticks(100, 1000))
    busy = Busy(stat)
    stat.write_text(ticks(175, 1025, steal=500))
    assert busy.read() == {"busy/cpu": 0.75}  # what another virtual machine had is nobody's here
    assert busy.read() == {}  # no tick since
    stat.write_text(ticks(175, 1125))
    assert busy.read() == {"busy/cpu": 0.0}


def test_a_machine_that_does_not_tell(tmp_path):
    assert Busy(tmp_path / "none").read() == {}
    energy = Energy(tmp_path)
    assert energy.joules() is None
    assert "no energy counter" in energy.reason


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat here (not Linux)")
def test_this_machine_tells_its_use():
    busy = Busy()
    share, end = 0.0, time.monotonic() + 30
    while not share and time.monotonic() < end:
        sum(range(100_000))
        share = busy.read().get("busy/cpu", 0.0)
    assert 0 < share <= 1


def test_gpus(tmp_path, monkeypatch):
    used, counted = [30, 90], [5_000, 7_000]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=used[gpu]),
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: counted[gpu],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert Busy(tmp_path / "none").read() == {"busy/gpu": 0.6}
    energy = Energy(tmp_path)
    counted[:] = [6_000, 10_000]  # mJ
    assert energy.joules() == 4.0
    assert energy.joules() == 4.0


def test_joules_of_the_packages_alone_over_a_wrap(tmp_path):
    for name, start in (("intel-rapl:0", 1_000_000), ("intel-rapl:0:0", 5), ("intel-rapl:1", 9_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(str(start))
        (tmp_path / name / "max_energy_range_uj").write_text("10000000")
    energy = Energy(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3000000")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("999999")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("500000")  # has begun anew
    assert energy.joules() == pytest.approx(2.0 + 1.5)
