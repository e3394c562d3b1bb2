"""Batched sampling: one call chooses a token for every row, whatever their parameters.

The caller (the model runner) owns one `SamplingTable`, with a row per slot, and one `Sampler`:

    table = SamplingTable(max_num_seqs, vocab_size, device)
    sampler = Sampler()
    ...
    # a request enters a slot: admitted, or resumed after preemption
    table.set_row(slot, params, seed, eos_token_ids, num_prompt_tokens)
    ...
    # each step, for the R rows that sample; slots and positions are host arrays of length R
    metadata = table.select(slots, positions, token_ids)
    output = sampler(logits, metadata)  # logits[R, V], row i belongs to slots[i]
    output.token_ids  # int64[R] on the device
    output.logprobs  # Logprobs of output.logprobs_rows: rows with params.logprobs

- `seed` belongs to one sequence: the caller resolves `params.seed` and gives each child of an
  n > 1 request a different one.
- `positions[i]` is the absolute position of the token being sampled, that is the number of
  tokens before it.  Sampling a position again (after preemption) gives the same token.
- `token_ids[slot]` holds that slot's tokens, prompt first, valid up to the position; the runner
  passes its int32[max_num_seqs, max_model_len] array.  Only rows with bad words or penalties read it.
- A slot with k draft tokens takes k + 1 consecutive rows at increasing positions, and its drafts
  are in `token_ids`.  Row i is sampled after `token_ids[slot, :positions[i]]`.  The table
  remembers of a slot only what comes before the first of its positions, so refused drafts leave no trace.
- `select` returns at once if all rows are plain greedy, and the sampler then does one argmax.
- A slot that becomes free needs no call.
- The table does not validate parameters: the engine does, when it takes the request.  `set_row`
  only raises `ValueError` for token ids outside the vocabulary, which would corrupt other rows.
- On a GPU one kernel chooses for all rows, and the host waits for nothing until it reads a
  result.  Where that kernel cannot be launched, the groups of `choose.py` wait a few times for
  rows with top_k, top_p or min_p.  `compile_ops` compiles kernels before the first request.

`prompt_logprobs(logits[P, V], next_token_ids[P], top)` makes the entries of prompt tokens.

Order and definitions are vLLM's.  All arithmetic is in float32; log probabilities are those of the
raw logits, except that grammars come before.  In order of application:

0. Grammars (`rules/grammar_mask.py`): what they do not allow is masked, log probabilities are those of what is left,
   and where the other rules would leave nothing of it, they do not apply.
1. The other rules in `rules/`: logit_bias; EOS and stop token ids masked until min_tokens, ignore_eos or
   not; bad words, matched against the output only; repetition penalty over prompt and output,
   frequency and presence penalties over the output.
2. temperature (below 1e-5 the row is greedy).
3. min_p, relative to the most likely token.
4. top_k.
5. top_p: the smallest set that reaches p of what min_p and top_k left, at least one token.

Equal logits are ordered by token id, lowest first, everywhere.  Fully masked rows still give
a token of the vocabulary.  Rows with logits that are not numbers (NaN, +inf, nothing but -inf) give
none, and their requests fail (`unusable.py`).
"""

from __future__ import annotations

from inflight.sampling.metadata import SamplerOutput, SampleRow, SamplingMetadata
from inflight.sampling.sampler import Sampler
from inflight.sampling.table import SamplingTable, sampling_metadata
from inflight.sampling.token_logprobs import prompt_logprobs
from inflight.sampling.unusable import NO_TOKEN, UNUSABLE_LOGITS, fail_unusable_rows

__all__ = [
    "NO_TOKEN",
    "UNUSABLE_LOGITS",
    "SampleRow",
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "SamplingTable",
    "fail_unusable_rows",
    "prompt_logprobs",
    "sampling_metadata",
]
