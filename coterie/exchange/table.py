"""All exchanges by name."""

from __future__ import annotations

from coterie.config import Config
from coterie.exchange import allreduce, gossip, hogwild, solo, store
from coterie.exchange.base import ExchangeKind
from coterie.plugins import choose, register

EXCHANGES: dict[str, ExchangeKind] = {
    "solo": solo.KIND,
    "allreduce": allreduce.KIND,
    "hogwild": hogwild.KIND,
    "store": store.KIND,
    "gossip": gossip.KIND,
}


def resolve_exchange(config: Config) -> str:
    """The exchange's name; `auto` is solo for a learner without others, and allreduce for several."""
    if config.exchange != "auto":
        return config.exchange
    return "solo" if config.learners == 1 and not EXCHANGES["allreduce"].address(config) else "allreduce"


def register_exchange(name: str, kind: ExchangeKind) -> None:
    """Add an exchange: `--exchange NAME`."""
    register(EXCHANGES, name, kind)


def exchange_kind(config: Config) -> ExchangeKind:
    return choose(EXCHANGES, "exchange", resolve_exchange(config), config)
