"""Servers and gossiping runs that are closed after each test."""

from tests.wire.conftest import address, gossip_clients, hubs, serve

__all__ = ["address", "gossip_clients", "hubs", "serve"]
