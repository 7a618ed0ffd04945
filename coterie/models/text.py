"""The language channel: an instruction's words, embedded and read by an LSTM.

IMPALA (https://arxiv.org/abs/1802.01561, section 5 and figure 3): embeddings of 20 (1000 of them, as in the authors'
code), and an LSTM of 64 whose last state stands beside the image's features. It carries nothing from one step to the
next: every step reads the whole instruction again.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from coterie.models.cores import make_lstm
from coterie.types import ObsSpec

_EMBEDDING, _LSTM = 20, 64


class TextTorso(nn.Module):
    """`[N, L]` integers (a word's bucket, 0 behind the last word) -> `[N, 64]`, the LSTM's state after the last word.

    No words give zeros. A rollout has few distinct instructions: each is read once, and its features copied to all its
    rows (256 rows of 36 instructions, one core: forward 0.4 ms instead of 1.2, with backward 1.9 instead of 7.4; where
    all rows differ it takes up to a fifth longer). Runs in the weights' own precision also under autocast.
    """

    mix: Tensor

    def __init__(self, spec: ObsSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(int(spec.high) + 1, _EMBEDDING, padding_idx=0)
        self.lstm = make_lstm(_EMBEDDING, _LSTM, forget_bias=1.0)
        self.size = _LSTM
        # Rows are compared by one number each, their product with these: sorting whole rows takes ten times as long.
        # Two different rows have the same number with probability 2^-55.
        mix = torch.randint(-(2**63), 2**63 - 1, spec.shape, generator=torch.Generator().manual_seed(0))
        self.register_buffer("mix", mix, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        if torch.compiler.is_compiling():  # torch.export, which supports no data-dependent sizes
            return self._read(x)
        keys, which = torch.unique((x * self.mix).sum(1), return_inverse=True)
        some = which.new_empty(len(keys)).scatter_(0, which, torch.arange(len(x), device=x.device))
        return self._read(x[some]).index_select(0, which)

    def _read(self, x: Tensor) -> Tensor:
        """`[K, L]` -> `[K, 64]`."""
        count = (x != 0).sum(1)
        longest = x.shape[1] if torch.compiler.is_compiling() else max(1, int(count.max()))
        with torch.autocast(x.device.type, enabled=False):
            y, _ = self.lstm(self.embedding(x[:, :longest].t()))
        last = y[(count - 1).clamp(min=0), torch.arange(x.shape[0], device=x.device)]
        return last * (count > 0)[:, None]  # type: ignore[no-any-return]


@functools.cache
def uncompiled() -> type[TextTorso]:
    """The torso of a model that is compiled, which leaves this part out: the number of distinct rows changes from call
    to call. Made only there, because `disable` imports all of the compiler, in about a second.
    """

    class Uncompiled(TextTorso):
        forward = torch.compiler.disable(TextTorso.forward)  # type: ignore[no-untyped-call]

    return Uncompiled
