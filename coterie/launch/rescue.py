"""After a learner has died: save what was learned since the last checkpoint, before all learners restart from it."""

from __future__ import annotations

from functools import partial

from coterie.build.factory import make_model, normalizers
from coterie.errors import CoterieError
from coterie.exchange.table import exchange_kind
from coterie.launch.coordinator import Coordinator
from coterie.parallel.board import HOLD, SAVE
from coterie.parallel.clock import awake
from coterie.parallel.params import FlatParams
from coterie.parallel.weights import Weights
from coterie.roles.entry import RESCUE_S, Saved
from coterie.runs import checkpoint
from coterie.runs.files import answered


class Rescue:
    """An order to save. The learners that are left carry it out, or the run itself does with what the last one kept.

    `reason`: of the death.
    """

    def __init__(self, run: Coordinator, reason: str) -> None:
        self.run, self.reason = run, reason
        run.give_up_order()
        run.paused = True
        run.order_checkpoint(SAVE | HOLD)
        self.order, self.end = run.order, awake() + RESCUE_S

    @property
    def is_over(self) -> bool:
        return self.order is None or self.run.order != self.order or awake() > self.end

    def settle(self) -> None:
        """Time is over: in lockstep, and of shared weights, the parts that are there hold everything."""
        run, kind = self.run, exchange_kind(self.run.config)
        if run.order == self.order and run.saved and (kind.in_lockstep or kind.shared_weights):
            run.members &= run.saved.keys()
            run.poll()

    def lose(self, rank: int, kept: Weights | None) -> None:
        """A learner is gone. `kept`: what it has left."""
        run = self.run
        run.members.discard(rank)
        if run.members | run.saved.keys() or self.is_over:
            return
        try:
            if kept is None or not self._save(rank, kept):
                run.give_up_order()
        except (CoterieError, OSError) as error:
            run.receive(rank, "unsaved", (self.order, str(error)))

    def _save(self, rank: int, kept: Weights) -> bool:
        """Write a learner's part of a checkpoint: that of the last one, with the weights and normalizers that it kept
        and the counts that it reported with them. False if there is nothing newer.
        """
        run, report, last = self.run, self.run.ledger.reports.get(rank), checkpoint.latest(self.run.root)
        if report is None or last is None or self.order is None:
            return False
        part, state, *_ = checkpoint.load_part(last, rank, False, run.config.log.stall / 2)
        before, now = (row["learned"] + row["masked"] for row in (state["learners"][rank], report.counts))
        model = make_model(run.config, run.spec)
        model.load_state_dict(part["model"])
        params, moments = FlatParams(model), normalizers(run.config, model)
        sums = moments.read()
        if now <= before or not kept.read_version(now, params.data, sums) or params.nonfinite(params.data):
            return False
        moments.write(sums)
        part["model"] = dict(model.state_dict())
        groups = {f"learner_{rank}/{name}": group for name, group in part.items()}
        draft = checkpoint.draft_path(run.root, f"order_{self.order}")
        answered(partial(checkpoint.write, draft, groups), run.config.log.stall / 2)
        run.receive(rank, "saved", Saved(self.order, report.counts, ""))
        return True
