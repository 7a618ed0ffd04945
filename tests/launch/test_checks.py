"""What is refused, or said, before a run writes anything; and losses that are none."""

from __future__ import annotations

import socket

import pytest

import coterie
from coterie import presets
from coterie.algorithms.a2c import A2C
from coterie.errors import ConfigError, CoterieError
from coterie.launch import checks
from tests.conftest import make_config

SMALL = {"env.num_envs": 4, "algo.unroll_length": 8, "log.tensorboard": False}


@pytest.mark.parametrize(
    ("preset", "field"), [("impala", "wire.bind"), ("gala-a2c", "gossip.bind"), ("ppo", "allreduce.bind")]
)
def test_a_port_in_use_is_refused_before_the_run_has_a_folder(tmp_path, preset, field):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        changes = {field: address, "out": str(tmp_path / "run"), **({"learners": 2} if preset != "impala" else {})}
        config = presets.make(preset, "CartPole-v1", **changes)
        with pytest.raises(ConfigError, match=rf"^{field}: cannot listen at {address}: Address already in use$"):
            coterie.train(config, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_shorter_than_a_rollout_says_how_long_it_is(tmp_path, capsys):
    config = presets.a2c("CartPole-v1", steps=20, out=str(tmp_path / "run"), **SMALL)
    assert coterie.train(config)["env_steps"] > 20
    assert "steps: 20 is less than one batch of rollouts: the run ends after about 32" in capsys.readouterr().out


def test_far_more_processes_than_cores_are_said(monkeypatch):
    monkeypatch.setattr(checks, "available_cores", lambda: [0, 1])
    line = "learners: 50 share 2 cores: no faster than fewer, and each has its own memory"
    assert checks.crowded(make_config(learners=50, actors=0)) == line
    assert checks.crowded(make_config(learners=1, actors=50)) == line.replace("learners", "actors")
    assert not checks.crowded(make_config(learners=8, actors=0))


class Bare(A2C):
    def loss(self, model, batch):
        return super().loss(model, batch).total


class Detached(A2C):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        loss.total = loss.total.detach()
        return loss


class Several(A2C):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        loss.total = loss.total.expand(2)
        return loss


class Named(A2C):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        loss.metrics["kind"] = "policy"
        return loss


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (Named, "the metric kind of a Loss must be a tensor of one number"),
        (Bare, "loss must return a Loss, as combine does, not Tensor"),
        (Detached, r"the total of a Loss has no gradient; was it detached\?"),
        (Several, r"the total of a Loss must be a tensor of one number, not a tensor \[2\]"),
    ],
)
def test_a_loss_of_the_users_that_is_none_is_one_line(tmp_path, algorithm, says):
    config = presets.a2c("CartPole-v1", steps=500, out=str(tmp_path / "run"), algorithm=algorithm, **SMALL)
    with pytest.raises(CoterieError, match=says):
        coterie.train(config, quiet=True)


class Unclosable(A2C):
    def close(self):
        raise OSError("a file of mine")


def test_a_part_that_cannot_be_closed_hides_nothing(tmp_path, capsys):
    config = presets.a2c("CartPole-v1", steps=64, out=str(tmp_path / "run"), algorithm=Unclosable, **SMALL)
    assert coterie.train(config)["status"] == "finished"
    assert "a part of the run cannot be closed: OSError: a file of mine" in capsys.readouterr().out


def broken(*args):
    raise KeyError("key")


@pytest.mark.parametrize("part", ["acting", "exchange"])
def test_a_part_of_the_users_that_cannot_be_made_is_one_line(tmp_path, part):
    config = presets.a2c("CartPole-v1", out=str(tmp_path / "run"), **SMALL, **{f"plugins.{part}": f"{__name__}:broken"})
    with pytest.raises(CoterieError, match=rf"plugins.{part}: .*:broken cannot be made: KeyError: .* in broken"):
        coterie.train(config, quiet=True)
