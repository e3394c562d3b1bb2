"""Drafters for the hash "model" of engine_rig, known to be right or wrong, and a gate at admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_rig import VOCAB, next_token

from inflight.engine.core import EngineCore
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, NotYet
from inflight.engine.request import Request

KINDS = ("right", "wrong", "half", "eager")


class HashDrafter:
    """Drafts `length` tokens: "right" drafts what the model will choose, "wrong" never does, "half" at every other
    position; "eager" is right and drafts more than the limit."""

    active = True

    def __init__(self, kind: str, length: int = 4) -> None:
        assert kind in KINDS
        self.kind = kind
        self.length = length
        self.num_proposed = self.num_drafts = self.num_accepted = 0

    def propose(self, request: Request, num_unknown: int, limit: int) -> Sequence[int]:
        assert num_unknown >= 0 and limit >= 1
        tokens = request.token_ids.tolist()
        length = limit + 7 if self.kind == "eager" else min(self.length, limit)
        for _ in range(num_unknown + length):
            tokens.append(next_token(tokens))
        first = request.num_tokens + num_unknown
        drafts = [token if self._is_right(first + i) else (token + 1) % VOCAB for i, token in enumerate(tokens[first:])]
        self.num_proposed += len(drafts)
        return drafts

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def _is_right(self, position: int) -> bool:
        return self.kind != "wrong" and (self.kind != "half" or position % 2 == 0)


class Gate:
    """Answers "not yet" for the requests in `waits`, and otherwise as `inner`.

    Attributes:
        waits: request id -> how many more times the answer is "not yet"; None: always.
    """

    def __init__(self, inner: AdmissionPolicy, waits: dict[int, int | None], seconds: float = 1e9) -> None:
        self._inner = inner
        self.waits = waits
        self.seconds = seconds

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        left = self.waits.get(request.request_id, 0)
        if left == 0:
            return self._inner.admits(request, prefix, running, pool)
        if left is not None:
            self.waits[request.request_id] = left - 1
        return NotYet("its grammar to compile", self.seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def add_gate(core: EngineCore, waits: dict[int, int | None], seconds: float = 1e9) -> Gate:
    policies = core.scheduler.policies
    policies.admission = gate = Gate(policies.admission, waits, seconds)
    return gate
