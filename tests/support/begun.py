"""What a run with `init_from` begins with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def check_begins_with(model: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """The same tensors, but that the rows which normalizers of observations have seen count as 100,000."""
    for name, x in model.items():
        part, _, last = name.rpartition(".")
        counted = name.startswith("obs_norm.") and last in ("count", "m2")
        more = 100_000 / saved[f"{part}.count"] if counted else 1
        torch.testing.assert_close(x, saved[name] * more, rtol=1e-12 * counted, atol=0, msg=name)
