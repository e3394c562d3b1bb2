"""A model with real weights: greedy float32 output equals that of transformers' `generate()`, token for token.

Its logits are peaked, its heads have outliers, and its chats end by themselves: random weights have none of these.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from offline import make_core, run, tokens
from transformers_answers import Answers

from inflight.engine.core import EngineCore
from inflight.engine.sampling_params import SamplingParams

CHATS: list[tuple[str, ...]] = [
    ("What is the capital of France?",),
    ("Hi", "Hello! How can I help you today?", "Write a haiku about rain in 1987."),
    ("Ça va, 你好? 🎉",),
]
MORE_CHATS: list[tuple[str, ...]] = [
    ("Write a Python function that reverses a string.",),
    ("Name three rivers in Europe.", "Rhine, Danube and Loire.", "Which is the longest?"),
    ("Translate 'good morning' into French.",),
    ("def fibonacci(n):\n    '''",),
    ("What is 17 times 3?", "51", "And 51 times 2?"),
]


def check(core: EngineCore, answers: Answers, prompts: list[list[int]], counts: list[int], stagger: int = 0) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in counts]
    deltas = run(core, prompts, params, stagger)
    for index, (prompt, count) in enumerate(zip(prompts, counts)):
        assert tokens(deltas[index, 0]) == answers.tokens(prompt, count), index


def test_chats_in_one_batch_equal_generate(smollm2: Path, answers: Answers) -> None:
    """Prompts in chunks that are shorter than they are; the first answer ends by itself."""
    core = make_core(
        str(smollm2), max_num_batched_tokens=40, max_num_seqs=8, max_model_len=1024, kv_cache_memory="64MiB"
    )
    prompts = [answers.chat(*chat) for chat in CHATS]
    assert max(map(len, prompts)) > 40
    check(core, answers, prompts, [12, 8, 8], stagger=1)
    assert answers.tokens(prompts[0], 12)[-1] == answers.tokenizer.eos_token_id


@pytest.fixture(scope="module")
def document(answers: Answers) -> list[int]:
    """A chat of some 2,000 tokens about Python's documentation."""
    ids = answers.tokenizer("\n\n".join(topics[name] for name in sorted(topics)[:10])).input_ids
    return answers.chat(f"Summarise this:\n\n{answers.tokenizer.decode(ids[:1970])}")


SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": dict(max_num_batched_tokens=4096),
    "chunks": dict(max_num_batched_tokens=100, block_size=7),
    "launched ahead": dict(max_num_batched_tokens=256, async_scheduling=True),
    "transformers' modules": dict(max_num_batched_tokens=512, native_forward=False),
}


@pytest.mark.nightly
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_long_context_beside_short_chats(smollm2: Path, answers: Answers, document: list[int], setting: str) -> None:
    assert len(document) >= 2000
    options = dict(max_model_len=2304, kv_cache_memory="256MiB", max_num_seqs=16, **SETTINGS[setting])
    chats = [answers.chat(*chat) for chat in (*CHATS, *MORE_CHATS)]
    prompts = [*chats[:2], document, *chats[2:]]
    counts = [40, 40, 24, *[40] * (len(chats) - 2)]
    check(make_core(str(smollm2), **options), answers, prompts, counts, stagger=2)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_chats(smollm2: Path, answers: Answers, mode: str, ahead: bool) -> None:
    """A pool in which no three of eight chats can end side by side."""
    core = make_core(
        str(smollm2),
        block_size=8,
        num_gpu_blocks_override=24,
        max_model_len=192,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        preemption_mode=mode,
        swap_space="64MiB",
        async_scheduling=ahead,
    )
    prompts = [answers.chat(*chat) for chat in (*CHATS, *MORE_CHATS)]
    check(core, answers, prompts, [40] * len(prompts))
    assert core.scheduler.num_preempted_total > 2, "the pool must be too small"
    assert (core.scheduler.swap.num_swapped_in > 0) is (mode == "swap")
