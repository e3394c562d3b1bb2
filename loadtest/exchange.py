"""A request and its timing, and what all clients of a load have in common."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadtest.errors import LoadTestError

__all__ = ["Exchange", "Failure", "LoadClient", "TimedClient", "no_model", "unreachable"]

_LONGEST_ERROR = 300  # characters


@dataclass
class Exchange:
    """The outcome of a request.

    Attributes:
        start: `time.time()` when it was sent.
        arrivals: (seconds after `start`, new tokens) of every response with tokens.
        latency: seconds to its last token, or to its failure.
        error: why it failed; None if the answer is complete.
        failure: the name of that error, under which a report counts it.
        counted: where the number of tokens comes from: "server", which says it with each response, "usage", which
            it says at the end, or "chunks": it says nothing, and a response with text counts as one token.
        ended_early: the model ended the answer before the requested length.
    """

    start: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    latency: float = 0.0
    error: str | None = None
    failure: str | None = None
    counted: str = "server"
    ended_early: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; for a model that answers in one response, its whole latency."""
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def itl(self) -> list[float]:
        """Seconds between one response with tokens and the next."""
        times = [at for at, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first response; None if there was only one."""
        later = sum(count for _, count in self.arrivals[1:])
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    def count_as(self, total: int) -> None:
        """Spread `total` tokens evenly over the responses with text, for servers that say the total only at the end."""
        responses = [at for at, _ in self.arrivals]
        # Rounded up, so that the first text contains at least one token.
        upto = [-(-total * number // len(responses)) for number in range(len(responses) + 1)]
        self.arrivals = [(at, b - a) for at, (a, b) in zip(responses, itertools.pairwise(upto)) if b > a]


class LoadClient(Protocol):
    """The interface of all clients.

    Attributes:
        traits: what `check` found out about the server, as plain values: another client can begin with them.
    """

    traits: dict[str, Any]

    @property
    def takes_ids(self) -> bool:
        """Whether prompts can be token ids."""

    def check(self) -> None:
        """Raise LoadTestError unless server and model are ready."""

    def check_adapter(self, name: str) -> None:
        """Raise LoadTestError if the server says that the adapter is another model's."""

    def send(self, prompt: list[int] | str, max_tokens: int, adapter: str = "") -> Exchange:
        """Send a greedy request that ignores the end of sequence; failures of the server end up in the result.

        Args:
            adapter: name of a LoRA adapter; "": the checkpoint alone.
        """


class Failure(Exception):
    """A request failed.

    Args:
        name: short; equal failures have equal names.
        detail: what the server said.
    """

    def __init__(self, name: str, detail: str = "") -> None:
        super().__init__(f"{name}: {detail}"[:_LONGEST_ERROR] if detail else name)
        self.name, self.detail = name, detail


class TimedClient:
    """Performs the exchange and turns a failure into its `error`."""

    traits: dict[str, Any]

    @property
    def takes_ids(self) -> bool:
        return True

    def check_adapter(self, name: str) -> None:
        pass

    def send(self, prompt: list[int] | str, max_tokens: int, adapter: str = "") -> Exchange:
        begun = time.perf_counter()
        exchange = Exchange(time.time())
        responses = self._responses(prompt, max_tokens, adapter, exchange)
        try:
            for tokens in responses:
                if tokens:
                    exchange.arrivals.append((time.perf_counter() - begun, tokens))
                if self._may_leave(exchange, max_tokens):
                    # Triton can close the stream of an answered request seconds later, when it is busy with the
                    # next batch, so the user does not wait.  Triton would cancel a stream that is not read.
                    threading.Thread(target=_drain, args=(responses,), daemon=True).start()
                    break
            if wrong := _wrong_length(exchange, max_tokens):
                raise Failure("wrong number of tokens", wrong)
        except Failure as failure:
            exchange.error, exchange.failure = str(failure), failure.name
            exchange.latency = time.perf_counter() - begun
        else:
            exchange.latency = exchange.arrivals[-1][0]
        return exchange

    def _may_leave(self, exchange: Exchange, max_tokens: int) -> bool:
        """Whether the answer is complete although its stream has not ended."""
        return exchange.tokens >= max_tokens

    def _responses(self, prompt: list[int] | str, max_tokens: int, adapter: str, exchange: Exchange) -> Iterator[int]:
        """The number of new tokens in each response; says in `exchange` how it counted.

        Raises:
            Failure: the request failed.
        """
        raise NotImplementedError


def _wrong_length(exchange: Exchange, max_tokens: int) -> str:
    """The fault in the number of tokens; empty if it can be right."""
    tokens = exchange.tokens
    if not tokens:
        return f"none arrived, but {max_tokens} were requested"
    if exchange.ended_early or exchange.counted == "chunks":
        return ""
    return "" if tokens == max_tokens else f"{tokens} arrived, but {max_tokens} were requested"


def _drain(responses: Iterator[int]) -> None:
    with contextlib.suppress(Failure):
        for _ in responses:
            pass


def unreachable(address: str, protocol: str, reason: str) -> LoadTestError:
    """Nothing answers at `address`, or nothing useful."""
    return LoadTestError(
        f"cannot reach {address} by {protocol} ({reason}); start a server there or correct the address"
    )


def no_model(model: str, address: str) -> LoadTestError:
    """The server does not have the model."""
    return LoadTestError(f"model {model!r} is not ready on {address}; load it there or choose another model")
