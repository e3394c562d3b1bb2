"""`lora_request` of `LLM` and `AsyncLLM`: as in vLLM, by the content of the folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from adapters import make_adapter, merged_checkpoint
from checkpoints import greedy_reference, make_checkpoint

from inflight import LLM, AsyncLLM, LoRARequest, SamplingParams

PROMPT, COUNT = {"prompt_token_ids": list(range(1, 30))}, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
OPTIONS = dict(dtype="float32", kv_cache_memory="8MiB", device="cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("lora"))


def of(checkpoint: str) -> list[int]:
    return greedy_reference(checkpoint, [PROMPT["prompt_token_ids"]], [COUNT])[0]


def test_one_adapter_a_list_and_a_folder_that_changes(llama: str, tmp_path: Path) -> None:
    one = make_adapter(tmp_path / "one", llama, strength=1.0)
    other = make_adapter(tmp_path / "other", llama, seed=5, strength=1.0)
    tokens = [
        of(path)
        for path in (llama, *(merged_checkpoint(llama, ref, tmp_path / f"m-{ref.name}") for ref in (one, other)))
    ]
    assert len(set(map(tuple, tokens))) == 3
    with LLM(llama, enable_lora=True, **OPTIONS) as llm:
        request = LoRARequest("mine", 7, one.path)
        found = llm.generate([PROMPT] * 3, GREEDY, lora_request=[None, request, LoRARequest("theirs", 7, other.path)])
        assert [output.outputs[0].token_ids for output in found] == tokens
        assert llm.generate(PROMPT, GREEDY, lora_request=request)[0].outputs[0].token_ids == tokens[1]
        *_, last = llm.stream(PROMPT, GREEDY, lora_request=request)
        assert last.outputs[0].token_ids == tokens[1]
        vectors = [llm.embed(PROMPT, lora_request=each)[0].outputs.embedding for each in (None, request)]
        assert not np.allclose(*vectors, atol=1e-2)
        make_adapter(tmp_path / "one", llama, seed=5, strength=1.0)
        assert llm.generate(PROMPT, GREEDY, lora_request=request)[0].outputs[0].token_ids == tokens[2]
        for given, said in [
            ([request], "3 prompts, but 1 lora_requests"),
            (LoRARequest("empty"), "'empty' has no lora_path"),
            (LoRARequest("gone", 1, "/nowhere"), "adapter 'gone': /nowhere has no adapter_config.json"),
        ]:
            with pytest.raises(ValueError, match=said):
                llm.generate([PROMPT] * 3, GREEDY, lora_request=given)
    with (
        LLM(llama, **OPTIONS) as llm,
        pytest.raises(ValueError, match="LoRA is off; make the LLM with enable_lora=True"),
    ):
        llm.generate(PROMPT, GREEDY, lora_request=request)


def test_async(llama: str, tmp_path: Path) -> None:
    ref = make_adapter(tmp_path / "one", llama, strength=1.0)

    async def run() -> list[list[int]]:
        async with AsyncLLM(llama, enable_lora=True, **OPTIONS) as llm:

            async def one(request: LoRARequest | None) -> list[int]:
                return (
                    [output async for output in llm.generate(PROMPT, GREEDY, lora_request=request)][-1]
                    .outputs[0]
                    .token_ids
                )

            return list(await asyncio.gather(one(None), one(LoRARequest("mine", 1, ref.path))))

    assert asyncio.run(run()) == [of(llama), of(merged_checkpoint(llama, ref, tmp_path / "merged"))]
