"""Cores against closed forms of queueing theory."""

from __future__ import annotations

import numpy as np
import pytest
import simpy

from coterie.tools.plan.des import Barrier, Cores


def test_a_job_runs_on_one_core_at_most():
    sim = simpy.Environment()
    cores = Cores(sim, 4)
    sim.run(until=cores.work(2.0, "x"))
    assert sim.now == pytest.approx(2.0)
    assert cores.work(0.0, "x").triggered


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_sojourn_under_processor_sharing_depends_on_the_load_only(load):
    """M/G/1 with processor sharing: E[T] = E[S] / (1 - rho), here for services that vary and for some that do not."""
    for fixed in (True, False):
        sim, rng = simpy.Environment(), np.random.default_rng(0)
        cores, took = Cores(sim, 1), []

        def job(cores=cores, took=took, sim=sim, rng=rng, fixed=fixed):
            begin = sim.now
            yield cores.work(1.0 if fixed else rng.gamma(0.5, 2.0), "x")
            took.append(sim.now - begin)

        def arrivals(sim=sim, rng=rng, job=job):
            for _ in range(20_000):
                yield sim.timeout(rng.exponential(1 / load))
                sim.process(job())

        sim.process(arrivals())
        sim.run()
        assert np.mean(took) == pytest.approx(1 / (1 - load), rel=0.1)


def test_a_barrier_begins_when_all_members_have_joined():
    sim, begun = simpy.Environment(), []
    barrier = Barrier(sim, 2)

    def member(pause: float):
        for _ in range(2):
            yield sim.timeout(pause)
            yield barrier.join()
            begun.append(sim.now)

    sim.process(member(1.0))
    sim.process(member(5.0))
    sim.run()
    assert begun == [5.0, 5.0, 10.0, 10.0]
