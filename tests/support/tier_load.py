"""Conversations that return all the time to a served model with KV tiers, and a canary beside them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from wire import GrpcStream

__all__ = ["CANARY", "TierLoad", "conversation"]

CANARY = [11, 12, 13, 14, 15]  # a prompt that no tier is asked for
OUTPUT = 12
_GREEDY = {"max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0}


def conversation(seed: int, length: int = 1300) -> list[int]:
    return [random.Random(seed).randrange(10, 2000) for _ in range(length)]


class TierLoad:
    """Streams that ask for one conversation after the other, and one that sends the canary's prompt.

    Leaving the context ends the streams, and raises what went wrong in them.

    Args:
        address: of the server, gRPC.
        expected: seed of a conversation -> tokens of its answer; and None -> those of the canary's.
        streams: lists of seeds, which each stream goes round and round.

    Attributes:
        num_answers: conversations that were answered, all of them right.
        num_canaries: canaries that were answered.
    """

    def __init__(
        self, address: str, model: str, expected: Mapping[int | None, list[int]], streams: Sequence[Sequence[int]]
    ) -> None:
        self.num_answers = self.num_canaries = 0
        self._address, self._model, self._expected = address, model, expected
        self._seconds: list[float] = []  # to the first response of each canary since the last call
        self._over, self._counts = threading.Event(), threading.Condition()
        self._failures: list[BaseException] = []
        loops: list[Callable[[], None]] = [lambda seeds=seeds: self._converse(seeds) for seeds in streams]  # type: ignore[misc]
        self._threads = [threading.Thread(target=self._watched, args=(loop,)) for loop in [*loops, self._canaries]]

    def wait(self, answers: int, canaries: int = 5, timeout: float = 300.0) -> list[float]:
        """Until so many more are answered.

        Returns:
            Seconds to the first response of each canary meanwhile, sorted.
        """
        with self._counts:
            self._seconds.clear()
            wanted = self.num_answers + answers, self.num_canaries + canaries
            done = self._counts.wait_for(
                lambda: bool(self._failures) or (self.num_answers >= wanted[0] and self.num_canaries >= wanted[1]),
                timeout,
            )
            assert done and not self._failures, f"{self.num_answers} of {wanted[0]} answers; {self._failures}"
            return sorted(self._seconds)

    def __enter__(self) -> TierLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _watched(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as failure:
            with self._counts:
                self._failures.append(failure)
                self._counts.notify_all()
            self._over.set()

    def _converse(self, seeds: Sequence[int]) -> None:
        with GrpcStream(self._address, self._model) as stream:
            number = 0
            while not self._over.is_set():
                seed = seeds[number % len(seeds)]
                self._ask(stream, f"{number}", conversation(seed), self._expected[seed])
                with self._counts:
                    self.num_answers += 1
                    self._counts.notify_all()
                number += 1

    def _canaries(self) -> None:
        with GrpcStream(self._address, self._model) as stream:
            while not self._over.is_set():
                seconds = self._ask(stream, f"{self.num_canaries}", CANARY, self._expected[None])
                with self._counts:
                    self._seconds.append(seconds)
                    self.num_canaries += 1
                    self._counts.notify_all()

    def _ask(self, stream: GrpcStream, request_id: str, prompt: list[int], expected: list[int]) -> float:
        """Seconds to the first response of a request, whose answer must be this."""
        begun = time.perf_counter()
        inputs: dict[str, Any] = {"input_ids": prompt, "stream": True, "return_token_ids": True}
        stream.send(request_id, **inputs, sampling_parameters=_GREEDY)
        stream.wait_chunks(request_id, 1)
        seconds = time.perf_counter() - begun
        stream.wait(request_id)
        answer = stream.answers.pop(request_id)
        assert answer.error is None and answer.token_ids == expected, (answer.error, answer.token_ids, expected)
        return seconds
