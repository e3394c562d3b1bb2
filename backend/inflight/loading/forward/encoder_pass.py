"""The forward pass of an encoder: hidden states of whole prompts, and the head of a classifier.

The modules are transformers' own.  Besides tokens they take positions, which some count from behind their padding
index, and for pairs of texts the one that each token belongs to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from inflight.attention.base import AttentionMetadata, current_batch
from inflight.attention.whole_rows import rows_of
from inflight.device.upload import upload
from inflight.engine.step import SchedulerOutput

__all__ = ["ClassifierHead", "EncoderPass", "attach_relative_bias", "first_position", "has_relative_bias"]


class EncoderPass:
    """Implements `ForwardPass`, and `StepHook` for the texts of pairs.

    Args:
        base: transformers' encoder without a head, with `WholeRowAttention` attached.
        head: see `ForwardPass`.
        offset: see `first_position`.
        vocab_size: columns of the logits, which have no rows.

    Attributes:
        knows_pairs: tokens are told apart by the text of a pair that they belong to.
        rows_read: int64 [N], ascending: the tokens of the step whose hidden states are read.
    """

    yields_hidden = True
    capturable = False
    max_rows = 1

    def __init__(
        self, base: Any, head: Callable[[Tensor], Tensor] | None, offset: int, max_num_seqs: int, vocab_size: int
    ) -> None:
        self.head = head
        self._base = base
        self._offset = offset
        self._vocab_size = vocab_size
        self.knows_pairs = _knows_pairs(base)
        self._second_start = np.zeros(max_num_seqs, dtype=np.int64)
        self._types: Tensor | None = None
        self.rows_read = torch.empty(0, dtype=torch.int64)

    def step(self, out: SchedulerOutput, batch: AttentionMetadata) -> None:
        for row in out.new_rows:
            self._second_start[row.slot] = row.attached.second_start if row.attached is not None else 0
        starts = self._second_start[out.slots]
        if not self.knows_pairs or not starts.any():
            self._types = None
            return
        types = [
            np.arange(count) >= (start or count) for start, count in zip(starts.tolist(), out.num_scheduled_tokens)
        ]
        self._types = upload(np.concatenate(types).astype(np.int64), batch.seq_lens.device)[None]

    def run(
        self, input_ids: Tensor, position_ids: Tensor, keep: Tensor, asked: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Iterable[Tensor], Tensor]:
        if len(keep) or len(asked):
            raise RuntimeError("an encoder has no logits; it yields vectors alone")
        more = {} if self._types is None else {"token_type_ids": self._types}
        positions = self._positions(input_ids, position_ids) if self._offset else position_ids
        self.rows_read = hidden
        states = self._base(input_ids=input_ids, position_ids=positions, **more)[0][0]
        return states.new_empty(0, self._vocab_size), (), states[hidden]

    def _positions(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Positions as such models count them: a padding token in a prompt has the padding index, and no place."""
        padding = self._offset - 1
        counts = (input_ids[0] != padding).long()
        so_far = counts.cumsum(0)
        first = torch.arange(len(so_far), device=so_far.device) - position_ids[0]  # of the token's prompt
        return ((so_far - so_far[first] + counts[first]) * counts + padding)[None]


class ClassifierHead:
    """The logits of transformers' `...ForSequenceClassification` for hidden states that are pooled already.

    The model is called with an encoder that returns them, as those of a prompt of one token: such a head reads the
    first token, or a mean.
    """

    def __init__(self, model: nn.Module, base: nn.Module) -> None:
        self._model = model
        self._base = base
        self._dtype = next(model.parameters()).dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        """float32 [R, H] -> float32 [R, labels]."""
        states = hidden.to(self._dtype)[:, None]
        pooler = getattr(self._base, "pooler", None)
        output = BaseModelOutputWithPooling(
            last_hidden_state=states,  # type: ignore[arg-type]
            pooler_output=None if pooler is None else pooler(states),
        )
        self._base.forward = lambda *_, **__: output
        try:
            return self._model(input_ids=torch.zeros(states.shape[:2], dtype=torch.int64, device=hidden.device))[
                "logits"
            ].float()
        finally:
            del self._base.forward


def first_position(base: nn.Module) -> int:
    """The position of a prompt's first token: behind the padding index, if the table of positions has one."""
    table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
    return 0 if table is None or table.padding_idx is None else int(table.padding_idx) + 1


def _knows_pairs(base: nn.Module) -> bool:
    has_types = getattr(base.config, "type_vocab_size", 0) or 0
    return has_types > 1 and "token_type_ids" in inspect.signature(base.forward).parameters


def has_relative_bias(base: Any) -> bool:
    """Whether its layers add a bias to their attention, by the distance of two tokens, as MPNet's do."""
    return hasattr(getattr(base, "encoder", None), "compute_position_bias")


def attach_relative_bias(base: Any) -> None:
    """Let the layers of such a model compute each row of a step with the bias of its own length, in place."""
    bias_of = base.encoder.compute_position_bias

    def biases(hidden_states: Tensor, *_: Any, **__: Any) -> dict[int, Tensor]:
        """[1, Hq, n, n] for each length n of a row."""
        lengths = {end - start for start, end in rows_of(current_batch())}
        return {length: bias_of(hidden_states.new_empty(1, length, 0)) for length in lengths}

    base.encoder.compute_position_bias = biases
    for layer in base.encoder.layer:
        layer.attention.attn = _BiasedAttention(layer.attention.attn)


class _BiasedAttention(nn.Module):
    """In place of MPNet's attention: the same for a ragged batch."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, position_bias: dict[int, Tensor], **_: Any
    ) -> tuple[Tensor]:
        """hidden_states [1, T, H] -> ([1, T, H],)."""
        module = self.module
        shape = hidden_states.shape[1], module.num_attention_heads, module.attention_head_size
        query, key, value = (part(hidden_states[0]).view(shape) for part in (module.q, module.k, module.v))
        out = torch.empty_like(query)
        for start, end in rows_of(current_batch()):
            q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
            bias = position_bias[end - start]
            out[start:end] = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)[0].transpose(0, 1)
        return (module.o(out.flatten(1))[None],)
