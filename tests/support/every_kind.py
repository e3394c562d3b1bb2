"""Requests of every kind, and everything that clients get of them, to compare engines with each other."""

from __future__ import annotations

from typing import Any

import torch
from checkpoints import VOCAB
from offline import run, tokens

from inflight.engine.core import EngineCore
from inflight.engine.sampling_params import SamplingParams

__all__ = ["every_kind", "prompt_of", "work_of"]


def prompt_of(index: int, length: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(index)).tolist()


def every_kind(index: int, **changes: Any) -> SamplingParams:
    """Greedy, drawn in every way, with every rule, with log probabilities, several sequences."""
    kinds: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=1.0, top_p=0.8, logprobs=2),
        dict(temperature=0.7, top_k=20, min_p=0.02),
        dict(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
        dict(temperature=0.0, prompt_logprobs=2, logprobs=0),
        dict(temperature=0.0, logit_bias={3: 4.0}, bad_words_ids=[[5], [7, 9]], min_tokens=4),
        dict(temperature=1.3, n=2),
        dict(temperature=0.0, frequency_penalty=1.5),
    ]
    return SamplingParams(**{"max_tokens": 9, "ignore_eos": True, "seed": index, **kinds[index % 8], **changes})


class Near(float):
    """Equal to what differs by a rounding: two numbers beside each other may round to different digits."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = None  # type: ignore[assignment]


def work_of(core: EngineCore, prompts: list[list[int]], params: list[SamplingParams], stagger: int) -> Any:
    """Everything that clients get, but for log probabilities' last digits: a batch's size changes how sums round."""
    deltas = run(core, prompts, params, stagger)
    found = {}
    for key, parts in deltas.items():
        entries = [entry for part in parts for entry in (part.logprobs or ())]
        found[key] = (
            tokens(parts),
            parts[-1].finish_reason,
            [[(token, Near(value)) for token, value, _ in entry] for entry in entries],
            sum(len(part.prompt_logprobs or ()) for part in parts),
        )
    return found
