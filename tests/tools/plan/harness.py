"""Layouts and services with round numbers, without variation unless given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coterie.config import Config
from coterie.runs import config_io
from coterie.tools.plan.layout import Hardware, RunLayout
from coterie.tools.plan.services import Costs, LinearCost, Services

EXCHANGE = {"solo": 0.01, "allreduce": 0.03, "hogwild": 0.02, "store": 0.03, "gossip": 0.02}
COSTS = Costs(
    env=LinearCost(0.0, 0.01), act=LinearCost(0.002, 0.001), unroll=LinearCost(0.005, 0.001),
    train=LinearCost(0.003, 0.002),
    exchange=EXCHANGE,
)  # fmt: skip
SETTINGS = {"central.wait": 0.0, "store.chunks": 1, "gossip.mix_every": 1}
#: Only envs and forwards cost anything.
BARE = Costs(LinearCost(0.0, 0.01), LinearCost(0.002, 0.0), LinearCost(), LinearCost(), dict.fromkeys(EXCHANGE, 0.0))


def services(costs: Costs = COSTS, **changes: Any) -> Services:
    return replace(Services(costs=costs), **changes)


def layout(
    acting: str = "inline", exchange: str = "solo", hardware: Hardware | None = None, **changes: Any
) -> RunLayout:
    """One env on one core, unrolls of 4; `changes` are of `RunLayout`, or settings of the acting or the exchange."""
    settings = {name: changes.pop(name) for name in list(changes) if "." in name}
    own: dict[str, Any] = {"unroll": 4, "config": config_io.replace(Config(), SETTINGS | settings)}
    own |= {} if acting == "inline" else {"producers": 1, "batches": 3}
    own |= changes
    own.setdefault("samples", float(own.get("batch", 1) * own["unroll"]))
    return RunLayout(acting=acting, exchange=exchange, hardware=hardware or Hardware(), **own)
