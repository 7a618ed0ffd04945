"""Teams of threads."""

from __future__ import annotations

from contextlib import closing

import torch

from coterie.parallel.threads import Team


def test_each_member_of_a_team_computes_with_one_thread():
    """Whatever the process's number is as it first does: sums depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with closing(Team(3)) as team:
            torch.set_num_threads(4)
            assert team.run([torch.get_num_threads] * 3) == [4, 1, 1]  # the first call is made here
    finally:
        torch.set_num_threads(before)
