"""Batched sampling: one call chooses a token for rows with different parameters.

The caller (the model runner) owns one `SamplingTable` with a row per slot and one `Sampler`:

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
    output.logprobs  # row i -> TokenLogprobs, rows with params.logprobs only

- `seed` is the sequence's own: the caller resolves `params.seed` and gives each child of an
  n > 1 request a different one.
- `positions[i]` is the absolute position of the token being sampled: how many tokens are before
  it.  A token sampled again at the same position (after preemption) is the same token.
- `token_ids[slot]` is an int array of that slot's tokens, prompt first, valid up to the position:
  the runner's int32[max_num_seqs, max_model_len] array will do.  It is read only for rows with
  bad words or penalties; what was read may not change until the slot's next `set_row`.
- `select` of rows that are all plain greedy returns at once and the sampler does one argmax.
- A slot that becomes free needs no call.
- `set_row` raises `ValueError` for token ids outside the vocabulary, so check params against it
  when a request is taken.
- On a GPU one kernel in the Triton language chooses for all rows, whatever their parameters, and
  the host waits for nothing but log probabilities, which are returned as Python values.  Where it
  cannot be launched the groups of `choose.py` wait once or a few times for rows with top_k,
  top_p or min_p.  `Sampler.warm_up` compiles the kernels before the first request.

`prompt_logprobs(logits[P, V], next_token_ids[P], top)` makes the entries of prompt tokens.

Order and definitions are vLLM's: float32; log probabilities are those of the raw logits;
logit_bias; EOS and stop token ids masked until min_tokens (ignore_eos or not); bad words, matched
against output tokens only; repetition penalty over prompt and output, frequency and presence
penalty over output; temperature (below 1e-5: greedy); min_p relative to the most likely token;
top_k; top_p, the smallest set that reaches p of what min_p and top_k left, at least one token.
Equal logits are ordered by token id, lowest first, everywhere.  Fully masked rows still give
a token of the vocabulary.
"""

from __future__ import annotations

from inflight.sampling.history import TokenHistory
from inflight.sampling.logprobs import prompt_logprobs
from inflight.sampling.metadata import SamplerOutput, SampleRow, SamplingMetadata
from inflight.sampling.sampler import Sampler
from inflight.sampling.table import SamplingTable, sampling_metadata

__all__ = [
    "SampleRow",
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "SamplingTable",
    "TokenHistory",
    "prompt_logprobs",
    "sampling_metadata",
]
