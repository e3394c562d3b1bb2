"""Vectors are those of transformers, alone and beside other requests, and leave generated tokens as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from offline import make_core, make_device_core
from pooled import expected_vector, pooled, vectors_of
from transformers import AutoModelForCausalLM

from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.loading.forward.native_decoder import NativeDecoder

KINDS = ("last", "mean", "cls")
PATHS: dict[str, dict[str, Any]] = {
    "native": {},
    "transformers": {"native_forward": False},
    "threaded": {"async_scheduling": True},
}
CHUNKED = {"max_num_batched_tokens": 48, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("pooling"))


@pytest.fixture(scope="module")
def reference(llama: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def chat(request_id: int, length: int = 20) -> AddRequest:
    params = SamplingParams(max_tokens=25, temperature=0.0, seed=0, ignore_eos=True)
    return AddRequest(request_id, prompt_of(length, seed=request_id), params)


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def mixture() -> list[AddRequest]:
    lengths = [1, 7, 48, 49, 130, 255]
    vectors = [pooled(10 + i, prompt_of(n, seed=i), KINDS[i % 3]) for i, n in enumerate(lengths * 2)]
    return [message for pair in zip(vectors, map(chat, range(8))) for message in pair] + vectors[8:]


@pytest.mark.parametrize("path", PATHS)
def test_vectors_beside_chats(llama: str, reference: Any, path: str) -> None:
    options = {**CHUNKED, **PATHS[path]}
    alone = vectors_of(make_core(llama, **options), [chat(i) for i in range(8)])[1]
    vectors, tokens = vectors_of(make_core(llama, **options), mixture())
    assert tokens == alone
    asked = {message.request_id: message for message in mixture()}
    assert len(vectors) == 12
    for request_id, vector in vectors.items():
        message = asked[request_id]
        assert message.attached is not None and message.attached.pooling is not None
        assert_near(vector, expected_vector(reference, message.prompt_token_ids, message.attached.pooling.kind))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "granite"])
def test_decoders(model_type: str, tmp_path: Path) -> None:
    path = make_checkpoint(model_type, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = [prompt_of(n, seed=n) for n in (3, 40, 70)]
    added = [pooled(3 * i + k, prompt, kind) for i, prompt in enumerate(prompts) for k, kind in enumerate(KINDS)]
    vectors, _ = vectors_of(make_core(path, **CHUNKED), added)
    for i, prompt in enumerate(prompts):
        for k, kind in enumerate(KINDS):
            found, expected = vectors[3 * i + k], expected_vector(model, prompt, kind)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_vector_depends_on_no_neighbour_and_no_chunk_to_the_bit(llama: str) -> None:
    core = make_core(llama, **CHUNKED)
    assert isinstance(core.runner.model, NativeDecoder)  # type: ignore[attr-defined]
    many, _ = vectors_of(core, mixture())
    whole = make_core(llama, max_num_batched_tokens=512)
    for message in mixture():
        if message.request_id in many:
            alone, _ = vectors_of(whole, [message])
            assert np.array_equal(alone[message.request_id], many[message.request_id])


def test_rows_of_vectors_have_no_logits(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(llama)
    forward, kept = core.runner.forward.run, []  # type: ignore[attr-defined]

    def recorded(ids: Any, positions: Any, keep: Any, asked: Any, hidden: Any) -> Any:
        kept.append((len(keep), len(hidden)))
        return forward(ids, positions, keep, asked, hidden)

    monkeypatch.setattr(core.runner.forward, "run", recorded)
    vectors_of(core, [pooled(1, prompt_of(9)), chat(2), pooled(3, prompt_of(5), "mean")])
    assert kept[0] == (1, 6), "one for the chat; the last of one, and all of the other"


def test_prompt_logprobs_in_the_same_step(llama: str, reference: Any) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0.0, seed=0)
    for options in ({}, {"native_forward": False}):
        vectors, _ = vectors_of(
            make_core(llama, **options), [AddRequest(1, prompt_of(30), params), pooled(2, prompt_of(12))]
        )
        assert_near(vectors[2], expected_vector(reference, prompt_of(12)))


def test_a_prompt_of_max_model_len_fills_the_pool(llama: str, reference: Any) -> None:
    """The void token has no place in the pool, and none of another request's."""
    core = make_core(llama, num_gpu_blocks_override=16, max_num_batched_tokens=64, max_num_seqs=2)
    assert core.info.max_model_len == 256 == 16 * core.config.block_size
    prompt = prompt_of(256)
    vectors, tokens = vectors_of(core, [pooled(1, prompt), pooled(2, prompt, "mean"), chat(3)])
    assert_near(vectors[1], expected_vector(reference, prompt))
    assert_near(vectors[2], expected_vector(reference, prompt, "mean"))
    assert tokens == vectors_of(make_core(llama), [chat(3)])[1]
    refused = core.add_request(pooled(4, [*prompt, 1]))
    assert refused is not None and "at most 256 fit max_model_len=256" in refused.message


def test_last_tokens_share_prefixes_with_chats_and_means_do_not(llama: str, reference: Any) -> None:
    core = make_core(llama)
    prompt = prompt_of(100)
    params = SamplingParams(max_tokens=3, temperature=0.0, seed=0, ignore_eos=True)
    vectors_of(core, [AddRequest(1, prompt, params)])
    queries = core.pool.num_prefix_queries
    vectors, _ = vectors_of(core, [pooled(2, [*prompt, 5]), pooled(3, [*prompt, 5], "mean"), pooled(4, prompt, "cls")])
    assert core.pool.num_prefix_hits == 96 and core.pool.num_prefix_queries - queries == 101
    assert_near(vectors[2], expected_vector(reference, [*prompt, 5]))
    assert_near(vectors[3], expected_vector(reference, [*prompt, 5], "mean"))
    assert_near(vectors[4], expected_vector(reference, prompt, "cls"))


def test_a_common_prefix_is_computed_once(llama: str) -> None:
    """As in a rerank: all documents arrive at the same time, behind one query."""
    core = make_core(llama)
    query = prompt_of(64)
    computed = []
    launch = core.runner.launch
    core.runner.launch = lambda out: computed.append(out.num_tokens) or launch(out)  # type: ignore[method-assign]
    vectors_of(core, [pooled(i, [*query, i, 7]) for i in range(5)])
    assert sum(computed) == 64 + 5 * 2


def preempting(llama: str, **options: Any) -> EngineCore:
    return make_core(llama, num_gpu_blocks_override=16, max_num_batched_tokens=6, max_num_seqs=6, **options)


@pytest.mark.parametrize("options", [{}, {"swap_space": "1MiB", "preemption_mode": "swap"}])
def test_preempted_ones_are_computed_again(llama: str, reference: Any, options: dict[str, Any]) -> None:
    """Chats that grow take the blocks of prompts that are partly computed."""
    core = preempting(llama, preemption_victim="longest", **options)
    params = SamplingParams(max_tokens=90, temperature=0.0, seed=0, ignore_eos=True)
    chats = [AddRequest(i, prompt_of(10, seed=i), params) for i in range(2)]
    long = [pooled(5 + k, prompt_of(190, seed=k), kind) for k, kind in enumerate(KINDS)]
    vectors, tokens = vectors_of(core, [*chats, *long])
    for k, kind in enumerate(KINDS):
        assert_near(vectors[5 + k], expected_vector(reference, prompt_of(190, seed=k), kind))
    assert core.scheduler.num_preempted_total > 0
    assert core.scheduler.swap.num_swapped_out == 0, "only prompts were preempted, and none is swapped"
    assert tokens == vectors_of(make_core(llama), chats)[1]


def test_an_aborted_one_leaves_its_slot_clean(llama: str, reference: Any) -> None:
    core = make_core(llama, max_num_seqs=1, max_num_batched_tokens=16)
    assert core.add_request(pooled(1, prompt_of(100), "mean")) is None
    core.step()
    core.abort(1)
    vectors, _ = vectors_of(core, [pooled(2, prompt_of(40), "mean")])
    assert_near(vectors[2], expected_vector(reference, prompt_of(40), "mean"))
    assert core.pool.num_used == 0


def test_a_vector_that_is_not_finite_fails_alone(llama: str) -> None:
    core = make_core(llama)
    pooler, broken = core.runner.pooling._pooler, pooled(1, prompt_of(5), dimensions=3)  # type: ignore[attr-defined]

    class Broken:
        facts = pooler.facts

        def __call__(self, hidden: Any, pooling: Any) -> Any:
            return pooler(hidden, pooling) / (0 if pooling.dimensions else 1)

    core.runner.pooling._pooler = Broken()  # type: ignore[attr-defined]
    for message in (broken, pooled(2, prompt_of(5)), chat(3)):
        assert core.add_request(message) is None
    message = core.step()
    assert [(failed.request_id, failed.code) for failed in message.failed] == [(1, "INTERNAL")]
    assert "vector for this request is not finite" in message.failed[0].message
    assert any(delta.pooled for delta in message.deltas)
    assert core.pool.num_used > 0, "the chat runs on"


def test_a_task_that_the_checkpoint_lacks_fails_alone(llama: str) -> None:
    core = make_core(llama)
    for message in (pooled(1, prompt_of(5), task="classify"), pooled(2, prompt_of(5)), chat(3)):
        assert core.add_request(message) is None
    message = core.step()
    assert [failed.request_id for failed in message.failed] == [1]
    assert "'classify' is no task of this checkpoint" in message.failed[0].message
    assert sum(delta.pooled is not None for delta in message.deltas) == 1


def test_a_step_that_raises_is_made_again_without_counting_twice(llama: str, reference: Any) -> None:
    """Its halves are made, and their sums go on from the step before."""
    core = make_core(llama, max_num_batched_tokens=24)
    sample, calls = core.runner._sample, []  # type: ignore[attr-defined]

    def raising(out: Any, *args: Any) -> Any:
        calls.append(len(out.slots))
        if len(out.slots) > 1:
            raise ValueError("more than one row")
        return sample(out, *args)

    core.runner._sample = raising  # type: ignore[attr-defined]
    vectors, _ = vectors_of(core, [pooled(1, prompt_of(60), "mean"), pooled(2, prompt_of(40, seed=1), "mean")])
    assert 2 in calls
    assert_near(vectors[1], expected_vector(reference, prompt_of(60), "mean"))
    assert_near(vectors[2], expected_vector(reference, prompt_of(40, seed=1), "mean"))


def test_the_runner_of_a_gpu(llama: str, reference: Any) -> None:
    core = make_device_core(llama, **CHUNKED)
    vectors, tokens = vectors_of(core, mixture())
    asked = {message.request_id: message for message in mixture()}
    for request_id, vector in vectors.items():
        message = asked[request_id]
        assert message.attached is not None and message.attached.pooling is not None
        assert_near(vector, expected_vector(reference, message.prompt_token_ids, message.attached.pooling.kind))
    assert tokens == vectors_of(make_device_core(llama, **CHUNKED), [chat(i) for i in range(8)])[1]
    longest = pooled(1, prompt_of(256))
    assert_near(vectors_of(core, [longest, chat(2)])[0][1], expected_vector(reference, prompt_of(256)))
