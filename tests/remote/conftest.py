"""Servers and gossiping runs that are closed after each test."""

from tests.wire.conftest import address, guests, hubs, serve

__all__ = ["address", "guests", "hubs", "serve"]
