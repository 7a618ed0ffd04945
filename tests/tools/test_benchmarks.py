"""Two benchmarks run to their end with the library as it is. What is typed in all of them, `make lint` checks."""

import json
import sys

import plan_check
import wire

from tests.tools.plan.harness import services


def test_plan_check_saves_each_round_and_predicts_the_same_again(tmp_path, monkeypatch):
    """With made-up costs, beside the real rate of one layout."""
    name = "inline solo, LunarLander"
    monkeypatch.setitem(plan_check.GROUPS, "ppo-lunar", (*plan_check.GROUPS["ppo-lunar"][:3], {name: {}}))
    monkeypatch.setattr(plan_check, "measure", lambda config, seconds: services())
    out, again = tmp_path / "a.json", tmp_path / "b.json"

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["plan_check.py", *map(str, args)])
        plan_check.main()

    run("--rounds", 1, "--seconds", 0.5, "--only", "ppo-lunar", "--out", out)
    found = json.loads(out.read_text())
    assert found["layouts"][name]["measured"] > 0
    run("--again", out, "--out", again)
    assert json.loads(again.read_text()) == found


def test_streams_of_the_wire_are_answered():
    found = wire.measure(streams=2, envs=4, processes=1, seconds=1.0)
    assert found["messages_per_s"] > 0
