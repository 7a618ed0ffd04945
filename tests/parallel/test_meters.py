"""Energy and load, from counters that a test has written."""

from __future__ import annotations

import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest

from coterie.parallel.meters import Busy, Energy
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_cores_in_use_since_the_last_call(monkeypatch):
    times = {"user": 100.0, "nice": 10.0, "system": 20.0, "idle": 1000.0, "iowait": 5.0, "steal": 0.0}
    monkeypatch.setattr("psutil.cpu_times", lambda: namedtuple("Times", times)(**times))
    busy = Busy()
    times |= {"user": 175.0, "idle": 1025.0, "steal": 500.0}
    assert busy.read() == {"busy/cpu": 0.75}  # without the time that other virtual machines had
    assert busy.read() == {}  # no time has passed
    times["idle"] = 1125.0
    assert busy.read() == {"busy/cpu": 0.0}


def test_a_busy_machine_reports_its_load_and_one_without_energy_counters_the_reason(tmp_path):
    busy, energy = Busy(), Energy(tmp_path)

    def load() -> float:
        sum(range(100_000))
        return busy.read().get("busy/cpu", 0.0)

    assert 0 < wait_until(load) <= 1
    assert energy.joules() is None
    assert "no energy counter" in energy.reason


def test_load_and_energy_of_gpus(tmp_path, monkeypatch):
    used, counted = [30, 90], [5_000, 7_000]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=used[gpu]),
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: counted[gpu],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert Busy().read()["busy/gpu"] == 0.6
    energy = Energy(tmp_path)
    counted[:] = [6_000, 10_000]  # mJ
    assert energy.joules() == 4.0
    assert energy.joules() == 4.0


def test_energy_is_that_of_the_packages_also_when_their_counters_wrap(tmp_path):
    for name, start in (("intel-rapl:0", 1_000_000), ("intel-rapl:0:0", 5), ("intel-rapl:1", 9_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(str(start))
        (tmp_path / name / "max_energy_range_uj").write_text("10000000")
    energy = Energy(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3000000")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("999999")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("500000")  # it has wrapped
    assert energy.joules() == pytest.approx(2.0 + 1.5)
