"""Chats with a real model whose engine and server are killed between turns: the answers of an undisturbed engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_entries import killed_at_the_end, write_entry
from offline import make_core, run, tokens
from processes_of import engine_process
from wire import GrpcStream, gauges, wait_for

from inflight.engine.sampling_params import SamplingParams
from inflight_tools.launcher import TritonServer

CHATS = {
    "capitals": [
        "What is the capital of France? Answer in one sentence.",
        "And that of Italy?",
        "Which is larger?",
        "Why?",
    ],
    "story": ["Write a story about rain in 1987.", "Go on.", "How does it end?", "Give it a title."],
}
ANSWER = 40
_ATTEMPTS = 10  # a busy machine can take longer to read than the engine expects to compute
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory": "192MiB"}


class Chats:
    """The chats so far, as token ids: each turn's prompt begins with all that was said."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._core = make_core(str(folder), **OPTIONS)  # without tiers
        self._messages: dict[str, list[dict[str, str]]] = {name: [] for name in CHATS}

    def prompts(self, turn: int) -> dict[str, list[int]]:
        found = {}
        for name, messages in self._messages.items():
            messages.append({"role": "user", "content": CHATS[name][turn]})
            found[name] = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return {name: prompt["input_ids"] for name, prompt in found.items()}

    def expected(self, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=ANSWER)] * len(prompts)
        deltas = run(self._core, list(prompts.values()), params)
        return {name: tokens(deltas[number, 0]) for number, name in enumerate(prompts)}

    def said(self, answers: dict[str, list[int]]) -> None:
        for name, answer in answers.items():
            text = self._tokenizer.decode(answer, skip_special_tokens=True)
            self._messages[name].append({"role": "assistant", "content": text})


def answered(server: TritonServer, prompts: dict[str, list[int]], kills: bool = False) -> dict[str, list[int]]:
    """
    Args:
        kills: the engine, once all answers have begun.
    """
    with GrpcStream(server.grpc_address, "chats") as stream:
        for name, prompt in prompts.items():
            params = {"max_tokens": ANSWER, "temperature": 0}
            stream.send(name, input_ids=prompt, stream=True, return_token_ids=True, sampling_parameters=params)
        for name in prompts if kills else ():
            stream.wait_chunks(name, 1)
        if kills:
            engine_process(server, "chats").kill()
        stream.wait(*prompts)
        assert not [answer.error for answer in stream.answers.values() if answer.error]
        return {name: stream.answers[name].token_ids for name in prompts}


@pytest.mark.nightly
def test_chats_go_on_whatever_is_killed_between_their_turns(
    triton_installed: None, smollm2: Path, keeping: dict[str, str], tmp_path: Path
) -> None:
    """First the engine, then the server, at last the engine in the middle of an answer."""
    chats, repository = Chats(smollm2), tmp_path / "models"
    tiers = [{"type": "host", "size": "256MiB"}, {"type": "disk", "path": str(tmp_path / "kv"), "size": "4GiB"}]
    write_entry(repository, "chats", model=str(smollm2), kv_tiers=tiers, **OPTIONS)

    def turn(server: TritonServer, number: int, kills: bool = False, returns: bool = False) -> None:
        """
        Args:
            returns: KV of the earlier turns comes from a tier; if it was computed, another engine is asked.
        """
        prompts = chats.prompts(number)
        expected = chats.expected(prompts)
        for _ in range(_ATTEMPTS):
            answers = answered(server, prompts, kills)
            assert answers == expected, f"turn {number}"
            if not returns or hits(server):
                break
            engine_process(server, "chats").kill()
        assert not returns or hits(server), f"turn {number}: everything was computed"
        chats.said(answers)

    def hits(server: TritonServer) -> float:
        """Tokens that came from a tier to the present engine."""
        return gauges(server.metrics_address, "chats").get("vllm:external_prefix_cache_hits_total", 0.0)

    def kept() -> int:
        files = [path for path in (tmp_path / "kv").rglob("*") if len(path.name) == 32 and path.is_file()]
        return sum(path.stat().st_size for path in files)

    with killed_at_the_end(TritonServer(repository, env=keeping)) as server:
        turn(server, 0)
        wait_for(kept)
        engine_process(server, "chats").kill()
        before = kept()
        turn(server, 1, returns=True)
        wait_for(lambda: kept() > before)
    with killed_at_the_end(TritonServer(repository, env=keeping)) as server:
        turn(server, 2, returns=True)
        turn(server, 3, kills=True)
        replayed = gauges(server.metrics_address, "chats")["inflight_requests_replayed_total"]
        assert replayed, "all answers had ended when the engine was killed"
