"""All exchanges by name."""

from __future__ import annotations

from coterie.choices import Choices, choose, register, resolve_exchange
from coterie.config import Config
from coterie.exchange.base import ExchangeKind

EXCHANGES: Choices[ExchangeKind] = Choices(
    solo="coterie.exchange.solo:KIND",
    allreduce="coterie.exchange.allreduce:KIND",
    hogwild="coterie.exchange.hogwild:KIND",
    store="coterie.exchange.store:KIND",
    gossip="coterie.exchange.gossip:KIND",
)


def register_exchange(name: str, kind: ExchangeKind) -> None:
    """Add an exchange: `--exchange NAME`. `kind`: as `KIND` in exchange/solo.py. Raises `ConfigError` for others."""
    register(EXCHANGES, "exchange", name, kind, ExchangeKind)


def exchange_kind(config: Config) -> ExchangeKind:
    return choose(EXCHANGES, "exchange", resolve_exchange(config), config)
