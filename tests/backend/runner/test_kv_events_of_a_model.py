"""KV events of an engine with a real model, without Triton."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from kv_events_rig import Ear

from inflight import LLM, SamplingParams
from inflight.config import ConfigError

DEMO = str(Path(__file__).parents[3] / "model_repository/demo/1/checkpoint")
SMALL = {"kv_cache_memory": "4MiB", "max_model_len": 256, "check_on_load": False}


def test_prompt_and_answer_are_told_with_their_tokens(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    prompt = [*range(10, 60)]
    with closing(Ear(endpoint)) as ear:
        llm = LLM(DEMO, **SMALL, kv_events_config={"enable_kv_cache_events": True, "endpoint": endpoint})
        try:
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
            said = [*prompt, *output.outputs[0].token_ids]
            full = (len(said) - 1) // 16  # the last token is never computed
            ear.hear_until(lambda: len(ear.knows.blocks) == full)
            prefixes = [ear.knows.prefix_of(block) for block in ear.knows.blocks]
            assert sorted(map(len, prefixes)) == [16 * (index + 1) for index in range(full)]
            assert all(prefix == said[: len(prefix)] for prefix in prefixes)
        finally:
            llm.close()
        ear.hear_until(lambda: not ear.knows.blocks)


def test_an_address_that_cannot_be_had_fails_the_load() -> None:
    with pytest.raises(ConfigError, match=r"kv_events_config.endpoint='5557' is not like tcp://\*:5557"):
        LLM(DEMO, **SMALL, kv_events_config={"enable_kv_cache_events": True, "endpoint": "5557"})
