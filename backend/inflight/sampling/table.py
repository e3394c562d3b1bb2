"""Sampling parameters of all slots as a struct of arrays: one row a slot, filled on admission."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu.launch import can_launch
from inflight.sampling.history import TokenCounts, TokenHistory, banned_tokens
from inflight.sampling.metadata import Penalties, RandomGroup, SampleRow, SamplingMetadata
from inflight.sampling.noise import mix_seed, row_keys

__all__ = ["GREEDY_TEMPERATURE", "SamplingTable", "sampling_metadata"]

# Below this a request is greedy.
GREEDY_TEMPERATURE = 1e-5

# What a slot needs beside an argmax; 0 is plain greedy.
_RANDOM, _BIAS, _MIN_TOKENS, _BAD_WORDS, _PENALTIES, _LOGPROBS = (1 << i for i in range(6))
_HISTORY = _MIN_TOKENS | _BAD_WORDS | _PENALTIES

# How a random slot is drawn: from the whole vocabulary, plainly or narrowed by top_p or min_p, or
# from its top_k.  Rows of a bucket are drawn together; several top_k buckets keep a row with a
# large k from widening the candidates of all others.
_FULL, _NARROWED = 1, 2
_TOP_K_BUCKETS = (64, 1024, 2**31)
_NUM_BUCKETS = _NARROWED + 1 + len(_TOP_K_BUCKETS)

# A greater bias acts as this one, so that sums stay finite; a lesser one than its negative bans.
_MAX_BIAS = 1e30


class SamplingTable:
    """Preprocessed sampling parameters, one row a slot.

    `set_row` once per admission, `select` once per step.  `select` costs a few numpy gathers
    whatever the batch; only rows with bias, bans, min_tokens or penalties cost Python time of
    their own.

    Args:
        max_num_seqs: number of slots.
        vocab_size: V, the last dimension of the logits.
        device: where the logits are.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._one_kernel = can_launch(self.device)
        self._flags = np.zeros(max_num_seqs, dtype=np.int32)
        self._bucket = np.zeros(max_num_seqs, dtype=np.int64)
        self._origin = np.zeros(max_num_seqs, dtype=np.uint64)
        self._inverse_temperature = np.ones(max_num_seqs, dtype=np.float64)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float64)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float64)
        self._strengths = np.tile(np.array([[1.0], [0.0], [0.0]], dtype=np.float32), max_num_seqs)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self._bias: list[tuple[np.ndarray, np.ndarray]] = [_NO_BIAS] * max_num_seqs
        self._stop_ids: list[list[int]] = [[]] * max_num_seqs
        self._bad_words: list[list[list[int]]] = [[]] * max_num_seqs
        self._counts: list[TokenCounts | None] = [None] * max_num_seqs

    def set_row(
        self, slot: int, params: SamplingParams, seed: int, eos_token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Fill a slot: a request was admitted, or resumed after preemption.  Old contents are void.

        Args:
            seed: 64-bit seed of this sequence; siblings of an n > 1 request have different ones.
            eos_token_ids: masked, with `params.stop_token_ids`, until `params.min_tokens`.
            num_prompt_tokens: where the output starts in the row's tokens.

        Raises:
            ValueError: a token id is not in the vocabulary.
        """
        params.validate(vocab_size=self.vocab_size)
        flags = 0
        self._num_prompt_tokens[slot] = num_prompt_tokens
        self._counts[slot] = None
        self._bucket[slot] = 0
        if params.temperature >= GREEDY_TEMPERATURE:
            flags |= _RANDOM
            self._set_random(slot, params, seed)
        if params.logit_bias:
            flags |= _BIAS
            self._bias[slot] = _bias_arrays(params.logit_bias)
        stop_ids = sorted({t for t in (*eos_token_ids, *params.stop_token_ids) if 0 <= t < self.vocab_size})
        if params.min_tokens and stop_ids:
            flags |= _MIN_TOKENS
            self._min_tokens[slot], self._stop_ids[slot] = params.min_tokens, stop_ids
        if any(params.bad_words_ids):
            flags |= _BAD_WORDS
            self._bad_words[slot] = [word for word in params.bad_words_ids if word]
        strengths = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if strengths != (1.0, 0.0, 0.0):
            flags |= _PENALTIES
        self._strengths[:, slot] = strengths
        if params.logprobs is not None:
            flags |= _LOGPROBS
            self._logprobs[slot] = params.logprobs
        self._flags[slot] = flags

    def _set_random(self, slot: int, params: SamplingParams, seed: int) -> None:
        self._origin[slot] = mix_seed(seed)
        self._inverse_temperature[slot] = 1.0 / params.temperature
        self._top_p[slot], self._min_p[slot] = params.top_p, params.min_p
        if 0 < params.top_k < self.vocab_size:
            self._top_k[slot] = params.top_k
            self._bucket[slot] = _NARROWED + 1 + int(np.searchsorted(_TOP_K_BUCKETS, params.top_k))
        else:
            self._bucket[slot] = _NARROWED if params.top_p < 1.0 or params.min_p > 0.0 else _FULL

    def select(
        self,
        slots: np.ndarray | Sequence[int],
        positions: np.ndarray | Sequence[int],
        token_ids: TokenHistory | None = None,
    ) -> SamplingMetadata:
        """Describe one sampling call: row i of the logits belongs to `slots[i]`.

        Args:
            slots: int[R]; each was filled by `set_row`.
            positions: int[R], absolute position of the token being sampled: the number of
                tokens before it.
            token_ids: tokens of a slot, read up to its position and only for rows with
                min_tokens, bad words or penalties.  Between two `set_row` of a slot its tokens
                may only be appended to.

        Raises:
            ValueError: `token_ids` is None but a row needs it.
        """
        slots = np.asarray(slots, dtype=np.int64)
        flags = self._flags[slots]
        needed = int(np.bitwise_or.reduce(flags)) if len(slots) else 0
        metadata = SamplingMetadata.all_greedy(len(slots))
        if not needed:
            return metadata
        metadata.vocab_size = self.vocab_size
        positions = np.asarray(positions, dtype=np.int64)
        if needed & _RANDOM:
            self._add_random(metadata, slots, positions)
        if needed & _BIAS:
            self._add_bias(metadata, slots, np.flatnonzero(flags & _BIAS))
        if needed & (_MIN_TOKENS | _BAD_WORDS):
            self._add_bans(metadata, slots, positions, flags, token_ids)
        if needed & _PENALTIES:
            self._add_penalties(metadata, slots, positions, np.flatnonzero(flags & _PENALTIES), token_ids)
        if needed & _LOGPROBS:
            rows = np.flatnonzero(flags & _LOGPROBS)
            metadata.logprobs = dict(zip(rows.tolist(), self._logprobs[slots[rows]].tolist()))
        return metadata

    def _add_random(self, metadata: SamplingMetadata, slots: np.ndarray, positions: np.ndarray) -> None:
        bucket = self._bucket[slots]
        order = np.argsort(bucket, kind="stable")
        sizes = np.bincount(bucket, minlength=_NUM_BUCKETS)
        by_bucket = slots[order]
        # One 8-byte-wide array so that one copy brings all to the device.
        packed = np.empty((6, len(slots)), dtype=np.int64)
        packed[0] = order
        packed[1] = row_keys(self._origin[by_bucket], positions[order]).T.copy().view(np.int64)[:, 0]
        packed[2] = top_k = self._top_k[by_bucket]
        top_p, min_p = self._top_p[by_bucket], self._min_p[by_bucket]
        packed[3:] = np.stack([self._inverse_temperature[by_bucket], top_p, min_p]).view(np.int64)
        metadata.columns = uploaded = self._upload(packed)
        ends = np.cumsum(sizes)
        metadata.first_columns = int(ends[0]), int(ends[_FULL]), int(ends[_NARROWED])
        metadata.greedy_rows = uploaded[0, : ends[0]]
        if self._one_kernel:
            return
        end = int(ends[0])
        for index in range(1, _NUM_BUCKETS):
            start, end = end, end + int(sizes[index])
            if start == end:
                continue
            part, rows = uploaded[:, start:end], order[start:end]
            keys = part[1].contiguous().view(torch.int32).view(-1, 2)
            reals = part[3:].view(torch.float64).unsqueeze(-1)
            metadata.random_groups.append(
                RandomGroup(
                    rows=part[0],
                    start=int(rows[0]) if rows[-1] - rows[0] == end - start - 1 else -1,
                    keys=(keys[:, :1], keys[:, 1:]),
                    inverse_temperature=reals[0].float(),
                    max_top_k=int(top_k[start:end].max()) if index > _NARROWED else 0,
                    top_k=part[2].unsqueeze(-1),
                    top_p=reals[1] if (top_p[start:end] < 1.0).any() else None,
                    min_p=reals[2].float() if min_p[start:end].any() else None,
                )
            )

    def _add_bias(self, metadata: SamplingMetadata, slots: np.ndarray, rows: np.ndarray) -> None:
        parts = [(self._bias[slots[row]][0] + row * self.vocab_size, self._bias[slots[row]][1]) for row in rows]
        metadata.bias_index = self._upload(np.concatenate([ids for ids, _ in parts]))
        metadata.bias_values = self._upload(np.concatenate([values for _, values in parts]))

    def _add_bans(
        self,
        metadata: SamplingMetadata,
        slots: np.ndarray,
        positions: np.ndarray,
        flags: np.ndarray,
        token_ids: TokenHistory | None,
    ) -> None:
        banned: list[int] = []
        num_output_tokens = positions - self._num_prompt_tokens[slots]
        for row in np.flatnonzero((flags & _MIN_TOKENS != 0) & (num_output_tokens < self._min_tokens[slots])).tolist():
            banned += [row * self.vocab_size + token for token in self._stop_ids[slots[row]]]
        for row in np.flatnonzero(flags & _BAD_WORDS).tolist():
            slot = int(slots[row])
            output = _history(token_ids)[slot][self._num_prompt_tokens[slot] : positions[row]]
            banned += [row * self.vocab_size + token for token in banned_tokens(self._bad_words[slot], output)]
        if banned:
            metadata.banned_index = self._upload(np.array(banned, dtype=np.int64))

    def _add_penalties(
        self,
        metadata: SamplingMetadata,
        slots: np.ndarray,
        positions: np.ndarray,
        rows: np.ndarray,
        token_ids: TokenHistory | None,
    ) -> None:
        history = _history(token_ids)
        ids, counts, sizes = [], [], []
        for row in rows.tolist():
            slot = int(slots[row])
            tokens = history[slot]
            seen = self._counts[slot]
            if seen is None:
                seen = self._counts[slot] = TokenCounts(
                    tokens[: self._num_prompt_tokens[slot]], with_prompt=bool(self._strengths[0, slot] != 1.0)
                )
            seen.update(tokens, int(positions[row]))
            ids.append(seen.ids[: seen.size])
            counts.append(seen.counts[: seen.size])
            sizes.append(seen.size)
        row_of = np.repeat(rows, sizes)
        metadata.penalties = Penalties(
            index=self._upload(np.concatenate(ids) + row_of * self.vocab_size),
            counts=self._upload(np.concatenate(counts)),
            rows=self._upload(row_of),
            strengths=self._upload(self._strengths[:, slots]),
        )

    def _upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


_NO_BIAS = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


def _bias_arrays(logit_bias: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    values = np.fromiter(logit_bias.values(), np.float64, len(logit_bias))
    values = np.where(values < -_MAX_BIAS, -np.inf, np.minimum(np.nan_to_num(values), _MAX_BIAS))
    return np.fromiter(logit_bias, np.int64, len(logit_bias)), values.astype(np.float32)


def _history(token_ids: TokenHistory | None) -> np.ndarray | TokenHistory:
    if token_ids is None:
        raise ValueError("token_ids is None, but a row has bad words or penalties: pass the tokens of its slot")
    return token_ids


def sampling_metadata(
    rows: Sequence[SampleRow], vocab_size: int, device: torch.device | str = "cpu"
) -> SamplingMetadata:
    """Describe rows without keeping a table: for one-off calls; a step loop keeps a `SamplingTable`."""
    table = SamplingTable(len(rows), vocab_size, device)
    for slot, row in enumerate(rows):
        table.set_row(slot, row.params, row.seed, row.eos_token_ids, len(row.prompt_token_ids))
    tokens = [np.concatenate([row.prompt_token_ids, row.output_token_ids]) for row in rows]
    return table.select(np.arange(len(rows)), np.array([row.position for row in rows], dtype=np.int64), tokens)
