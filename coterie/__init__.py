"""Coterie: distributed deep reinforcement learning from one code path."""

__version__ = "0.1.0"
