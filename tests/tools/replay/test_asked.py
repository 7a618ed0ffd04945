"""What a replay cannot do is refused before anything is replayed."""

from __future__ import annotations

import pytest

from coterie.cli.main import main
from coterie.flight.record import lives
from coterie.launch.session import resume
from tests.tools.replay.test_replay import run

LATER = "learner 0 has 49 recorded learner steps, and no step 50"
REFUSED = [
    ("--from step_1", "--from: no life began with 'step_1', but with start"),
    ("--from 99", "--from: learner 0 has rollouts up to learner step 48, none after 99"),
    ("--from 30 --to 10", "--to: 10 must be greater than 30, the step of --from"),
    ("--to 0", "--to: 0 must be at least 1, the first learner step"),
    ("--export-step 0", "--break-at or --export-step: 0 must be at least 1, the first learner step"),
    ("--export-step 40 --to 30", "--to: 30 must be at least 40, the learner step to look at"),
    ("--export-step 5 --break-at 5", "--export-step: --break-at cannot be given, too"),
    ("--export-step 5 --out RUN", "--out: RUN is a folder"),
    ("--export-step 50", LATER),
    ("--break-at 50", LATER),
    ("--break-at 5 --learner 1", "--learner: 1 is not one of the run's learners, 0 to 0"),
    ("--edit vtrace.rho_bar=3", "--edit: vtrace.rho_bar has no effect: a run of a2c does not use vtrace"),
]


@pytest.fixture
def folder(recorded):
    return recorded("a2c")


@pytest.mark.parametrize(("options", "says"), REFUSED)
def test_what_cannot_be_is_one_line(folder, capsys, options, says):
    assert main(["replay", str(folder), *options.replace("RUN", str(folder)).split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"coterie: {says.replace('RUN', str(folder))}\n")


def test_a_record_that_ends_before_the_last_step_that_is_asked_for_is_said(folder, capsys):
    assert main(["replay", str(folder), "--to", "1000"]) == 0
    assert "note: --to 1,000: the record ends before it, at learner step 49\n" in capsys.readouterr().out


def test_a_checkpoint_that_does_not_fit_an_edit_is_refused(tmp_path, capsys):
    run(tmp_path / "run", algorithm="a2c")
    resume(tmp_path / "run", steps=3000, quiet=True)
    second = lives(tmp_path / "run", 0)[1].header["checkpoint"]
    for looked in ("--break-at", "--export-step"):
        assert main(["replay", str(tmp_path / "run"), "--from", second, looked, "5"]) == 2
        line = "coterie: --break-at or --export-step: 5 must be greater than 49, where the lives begin\n"
        assert capsys.readouterr().err == line
    assert main(["replay", str(tmp_path / "run"), "--from", second, "--edit", "optim.rule=adam"]) == 2
    assert capsys.readouterr().err == "coterie: --edit: a checkpoint does not fit these settings: give --from start\n"
