"""How a part of one's own is named, and what is said where that cannot be."""

from __future__ import annotations

import pytest

from coterie import presets
from coterie.cli.main import main
from coterie.config import Config
from coterie.plugins import named
from coterie.runs.config_io import parse_cli, replace
from tests.plugins.page import write_files


@pytest.mark.parametrize("part", ["algorithm", "acting", "exchange"])
def test_a_name_with_a_colon_is_ones_own(part):
    for args in ([f"--{part}", "m:c"], [f"--{part}=m:c"], [f"--plugins.{part}", "m:c"]):
        config = parse_cli(Config(), args)
        assert (getattr(config.plugins, part), getattr(config, part)) == ("m:c", getattr(Config(), part))
    assert replace(Config(), {part: "m:c"}).plugins == config.plugins
    assert getattr(presets.a2c(env="CartPole-v1", **{part: "m:c"}).plugins, part) == "m:c"


def test_it_takes_the_place_of_the_one_that_is_named_beside_it():
    config = parse_cli(Config(), ["--exchange", "gossip", "--exchange", "m:c", "--learners", "2"])
    assert (config.exchange, config.plugins.exchange) == ("gossip", "m:c")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--algorithm", "nowhere:Mine"), "plugins.algorithm: cannot import 'nowhere:Mine': No module named 'nowhere'"),
        (("--acting", "late:Nope"), "plugins.acting: cannot import 'late:Nope': module 'late' has no attribute 'Nope'"),
        (("--exchange", ":"), "plugins.exchange: cannot import ':': it is not package.module:callable"),
        (("--exchange", ".mine:X"), "plugins.exchange: cannot import '.mine:X': it is not package.module:callable"),
        (("--acting", "late:Late.every"), "plugins.acting: 'late:Late.every' is int, which cannot be called"),
        (
            ("--exchange", "local_sgd:LocalSGD"),
            "plugins.exchange: local_sgd:LocalSGD is a kind of AllReduce, and this run has Solo in that place",
        ),
        (("--exchange", "late:short"), "plugins.exchange: late:short must take what Solo takes: too many positional"),
        (("--algorithm", "mine"), "algorithm: 'mine' is not one of a2c, ppo"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, args, says):
    write_files(tmp_path)
    with (tmp_path / "late.py").open("a") as file:
        file.write("\ndef short():\n    return None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["train", "a2c", "--env", "CartPole-v1", "--learners", "1", *args, "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_error_in_ones_own_module_is_shown_whole(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        named("plugins.acting", "broken:Any")
