"""The check of an encoder at load: a ragged batch has the hidden states that transformers computes for each prompt.

Prompts are short, uneven, and as long as a window of the model lets show; those of a model that knows pairs of texts
are pairs.  The head of a classifier is compared, too.  In half precision both sides are computed in float32, as for
decoders, and then the batch as it is served, within a few times the error that transformers' own rounding makes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import AttentionBackend, AttentionMetadata, forward_context
from inflight.attention.hf import IMPLEMENTATION
from inflight.engine.attached import Attached
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import NewRow, SchedulerOutput
from inflight.load_phases import enter_phase
from inflight.loading.check.load_check import EXACT
from inflight.loading.forward.encoder_pass import EncoderPass, has_relative_bias
from inflight.loading.load_errors import LoadError, in_models_code
from inflight.loading.quantization.in_float32 import InFloat32

__all__ = ["EncoderCheck", "check_prompts"]

_LENGTHS = (7, 12, 1, 40)
_OWN_ERRORS, _LEAST = 3.0, 0.005  # in half precision: multiples of transformers' own error, and what is always allowed

Results = list[tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class EncoderCheck:
    """The results of transformers, from before anything of the model is replaced.

    Attributes:
        prompts: their tokens, and the first one of a second text.
        exact: hidden states [n, H] and logits [labels] of each, alone, in float32.
        own_error: relative error of transformers in the model's dtype; 0 in float32.
    """

    model_type: str
    prompts: list[tuple[list[int], int]]
    exact: Results
    own_error: float
    reads: Callable[[Tensor], Tensor] | None
    device: torch.device

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        model: Any,
        base: Any,
        prompts: list[tuple[list[int], int]],
        reads: Callable[[Tensor], Tensor] | None,
        device: torch.device,
    ) -> EncoderCheck:
        """Run the prompts, each alone, through eager attention.

        Args:
            base: of `model`; `model` itself if that has no head.
            reads: pools the hidden states of a prompt for the head; None: there is no head.

        Raises:
            LoadError: transformers cannot.
        """
        enter_phase("computing reference hidden states")
        is_half = base.dtype != torch.float32
        switches = not has_relative_bias(base)  # else it has eager attention alone
        try:
            if switches:
                model.set_attn_implementation("eager")
            with InFloat32() if is_half else nullcontext():
                exact = [_alone(model, base, *prompt, device) for prompt in prompts]
            rounded = [_alone(model, base, *prompt, device) for prompt in prompts] if is_half else exact
        except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError) as error:
            raise LoadError(
                f"model type {model.config.model_type!r} is not supported: transformers' eager attention, with which "
                f"it is compared, fails: {type(error).__name__}: {error}{in_models_code(error)}"
            ) from error
        finally:
            if switches:
                model.set_attn_implementation(IMPLEMENTATION)
        if not all(hidden.isfinite().all() for hidden, _ in exact):
            raise LoadError(
                f"the checkpoint (model type {model.config.model_type!r}) cannot be served: its hidden states are not "
                "finite (NaN or infinity), so its weights contain NaN; check the files"
            )
        return cls(model.config.model_type, prompts, exact, _error(rounded, exact), reads, device)

    def require(self, forward: EncoderPass, backend: AttentionBackend, block_size: int) -> None:
        """Raise LoadError unless `forward` computes the same."""
        enter_phase("checking the hidden states")
        if self.own_error:
            with InFloat32():
                self._expect(self._ragged(forward, backend, block_size), EXACT, "in float32 ")
        allowed = _OWN_ERRORS * self.own_error + _LEAST if self.own_error else EXACT
        self._expect(self._ragged(forward, backend, block_size), allowed, "")

    def passes(self, forward: EncoderPass, backend: AttentionBackend, block_size: int) -> bool:
        """Whether `forward` computes the same, as it is served."""
        try:
            self.require(forward, backend, block_size)
        except LoadError:
            return False
        return True

    def _expect(self, found: Results, allowed: float, how: str) -> None:
        off = _error(found, self.exact)
        if off > allowed:
            raise LoadError(
                f"model type {self.model_type!r} is not supported: {how}the hidden states or logits of a test batch "
                f"differ by {off:.1%} (tolerance: {allowed:.1%}) from those of transformers' attention on each prompt "
                "alone; set check_on_load to false only if you know why they differ"
            )

    @torch.inference_mode()
    def _ragged(self, forward: EncoderPass, backend: AttentionBackend, block_size: int) -> Results:
        lengths = [len(token_ids) for token_ids, _ in self.prompts]
        starts = np.cumsum([0, *lengths]).tolist()
        metadata = _metadata(starts, lengths, block_size, self.device)
        forward.step(_step(self.prompts), metadata)
        ids = torch.tensor([token for token_ids, _ in self.prompts for token in token_ids], device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        nothing, all_tokens = ids[:0], torch.arange(len(ids), device=self.device)
        with forward_context(metadata, backend):
            *_, hidden = forward.run(ids[None], positions[None], nothing, nothing, all_tokens)
        rows = [hidden[start:end].float() for start, end in pairwise(starts)]
        if self.reads is None or forward.head is None:
            return [(row, None) for row in rows]
        logits = forward.head(torch.stack([self.reads(row) for row in rows]))
        return list(zip(rows, logits))


def check_prompts(vocab_size: int, max_model_len: int, window: int | None, pairs: bool) -> list[tuple[list[int], int]]:
    """Random tokens; the second half of each is a second text, if there are `pairs`."""
    lengths = [*_LENGTHS, *([window + _LENGTHS[1]] if window is not None else [])]
    rng = np.random.default_rng(0)
    fitting = [min(length, max_model_len) for length in lengths]
    return [(rng.integers(0, vocab_size, length).tolist(), length // 2 if pairs else 0) for length in fitting]


def _alone(
    model: Any, base: Any, token_ids: list[int], second: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    ids = torch.tensor([token_ids], device=device)
    types = {}
    if second:
        types["token_type_ids"] = (torch.arange(len(token_ids), device=device) >= second).long()[None]
    hidden = base(input_ids=ids, **types)[0][0].float()
    return hidden, None if model is base else model(input_ids=ids, **types).logits[0].float()


def _error(found: Results, right: Results) -> float:
    """The largest relative error of the hidden states of a prompt, or of the logits of all: one alone can be near 0."""
    pairs = [(mine[0], other[0]) for mine, other in zip(found, right)]
    logits = [(mine[1], other[1]) for mine, other in zip(found, right) if mine[1] is not None and other[1] is not None]
    if logits:
        mine, others = zip(*logits)
        pairs.append((torch.cat(mine), torch.cat(others)))
    errors = [(one - other).norm() / other.norm().clamp_min(1e-9) for one, other in pairs]
    return torch.stack(errors).max().nan_to_num(nan=torch.inf).item()


def _metadata(starts: list[int], lengths: list[int], block_size: int, device: torch.device) -> AttentionMetadata:
    """Of a step without blocks: nothing is kept."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=nothing,
        slot_mapping=nothing,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lengths,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        block_size=block_size,
    )


def _step(prompts: list[tuple[list[int], int]]) -> SchedulerOutput:
    rows = [
        NewRow(
            slot,
            request_id=slot,
            index=0,
            token_ids=b"",
            num_prompt_tokens=len(token_ids),
            block_ids=[],
            params=SamplingParams(max_tokens=1),
            seed=0,
            attached=Attached(second_start=second),
        )
        for slot, (token_ids, second) in enumerate(prompts)
    ]
    return SchedulerOutput(
        slots=list(range(len(prompts))),
        num_scheduled_tokens=[len(token_ids) for token_ids, _ in prompts],
        num_computed_tokens=[0] * len(prompts),
        samples=[True] * len(prompts),
        new_rows=rows,
    )
