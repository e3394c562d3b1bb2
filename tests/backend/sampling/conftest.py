"""A sampler of one row in plain numpy, against which the batched one is checked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inflight.engine.sampling_params import SamplingParams
from inflight.kernels import registry
from inflight.kernels.cpu.library import instruction_set, use_instruction_set
from inflight.sampling import SampleRow
from inflight.sampling.noise import mix_seed, negative_exponential, row_keys, token_hashes
from inflight.sampling.reference_sampling import ReferenceSampling


class Reference:
    """Each method is the definition of one stage for one row, without any batching."""

    @staticmethod
    def edited(logits: np.ndarray, row: SampleRow) -> np.ndarray:
        """float32[V] after the choice of allowed tokens, bias, bans and penalties."""
        params, output = row.params, row.output_token_ids.tolist()
        x = logits.astype(np.float32).copy()
        if params.allowed_token_ids is not None:
            x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -np.inf
        for token, bias in (params.logit_bias or {}).items():
            x[token] += np.float32(bias)
        if len(output) < params.min_tokens:
            x[[*row.eos_token_ids, *params.stop_token_ids]] = -np.inf
        for word in params.bad_words_ids:
            if word and output[len(output) - len(word) + 1 :] == word[:-1] and len(output) >= len(word) - 1:
                x[word[-1]] = -np.inf
        for token in set(row.prompt_token_ids.tolist()) | set(output):
            strength = np.float32(params.repetition_penalty)
            x[token] = x[token] / strength if x[token] > 0 else x[token] * strength
        for token in set(output):
            x[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
            x[token] -= np.float32(params.presence_penalty)
        return x

    @staticmethod
    def weights(x: np.ndarray, params: SamplingParams) -> np.ndarray:
        """float64[V] unnormalised probabilities after temperature, min_p, top_k and top_p."""
        scaled = (x * np.float32(1.0 / params.temperature)).astype(np.float64)
        weights = np.exp(scaled - scaled.max())
        weights[weights < np.float32(params.min_p)] = 0.0
        order = np.lexsort((np.arange(len(x)), -weights))
        if params.top_k > 0:
            weights[order[params.top_k :]] = 0.0
        above = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]])
        outside = above >= params.top_p * weights.sum()
        outside[0] = False
        if params.top_p < 1.0:
            weights[order[outside]] = 0.0
        return weights

    @staticmethod
    def exponentials(vocab_size: int, seed: int, position: int) -> np.ndarray:
        """float64[V]: the noise of every token for one (seed, position)."""
        keys = torch.from_numpy(row_keys(np.array([mix_seed(seed)], dtype=np.uint64), np.array([position])))
        noise = negative_exponential(
            token_hashes(vocab_size, torch.device("cpu")), (keys[0][:, None], keys[1][:, None])
        )
        return -noise[0].double().numpy()

    @classmethod
    def token(cls, logits: np.ndarray, row: SampleRow) -> int:
        x = cls.edited(logits, row)
        if row.params.temperature < 1e-5:
            return int(x.argmax())
        with np.errstate(divide="ignore"):
            race = cls.exponentials(len(x), row.seed, row.position) / cls.weights(x, row.params)
        return int(race.argmin())


@pytest.fixture(scope="session")
def reference() -> type[Reference]:
    return Reference


@pytest.fixture(params=["compiled", "avx2", "portable", "torch"], scope="module")
def drawn_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """How tokens are drawn on this CPU: by the kernel of each instruction set, or by torch's operations."""
    best = instruction_set()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(registry, "select_sampling", lambda device: ReferenceSampling())
        elif request.param != "compiled" and not use_instruction_set(request.param):
            pytest.skip(f"no {request.param} here")
        yield request.param
    use_instruction_set(best)
