"""The store of the rendezvous, with signed values: what a process without the token writes is not there."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

_HASH = "sha256"
_BYTES = 32


class SignedStore(Store):
    """Wraps a store of torch.distributed; its groups use it, too, so that a machine connects only to addresses of those
    that know the token. Others can read values, delete them and repeat old ones, but not make any.
    """

    def __init__(self, store: Any, token: str) -> None:
        super().__init__()
        self.store, self.token = store, token.encode()

    def clone(self) -> SignedStore:
        """Another connection: two threads on one wait for each other."""
        return SignedStore(self.store.clone(), self.token.decode())

    def _sign(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self.token, f"{key}\n".encode() + value, _HASH)

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        self.store.set(key, self._sign(key, content) + content)

    def get(self, key: str) -> bytes:
        """Waits for the key. Raises `RuntimeError` where its value is not signed."""
        found = self.store.get(key)
        if not hmac.compare_digest(found[:_BYTES], self._sign(key, found[_BYTES:])):
            raise RuntimeError(f"{key} is not signed with this run's token")
        return bytes(found[_BYTES:])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there, and signed."""
        try:
            return bool(self.store.check(list(keys))) and all(self.get(key) is not None for key in keys)
        except RuntimeError:
            return False

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(0)) -> None:
        self.store.wait(list(keys), timeout)

    def add(self, key: str, number: int) -> int:
        """Not signed: a counter that everyone can move."""
        return int(self.store.add(key, number))

    def delete_key(self, key: str) -> bool:
        return bool(self.store.delete_key(key))
