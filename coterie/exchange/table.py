"""All exchanges by name. A user's exchange is added by `coterie.plugins`."""

from __future__ import annotations

from coterie.config import Config, ExchangeName
from coterie.exchange import allreduce, gossip, hogwild, solo, store
from coterie.exchange.base import ExchangeKind

EXCHANGES: dict[str, ExchangeKind] = {
    "solo": solo.KIND,
    "allreduce": allreduce.KIND,
    "hogwild": hogwild.KIND,
    "store": store.KIND,
    "gossip": gossip.KIND,
}


def resolve_exchange(config: Config) -> ExchangeName:
    """The exchange's name; `auto` is solo for a learner without others, and allreduce for several."""
    if config.exchange != "auto":
        return config.exchange
    return "solo" if config.learners == 1 and not config.allreduce.address else "allreduce"


def exchange_kind(config: Config) -> ExchangeKind:
    return EXCHANGES[resolve_exchange(config)]
