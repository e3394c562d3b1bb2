"""Requests and outputs that begin come before chunks of outputs that run."""

from __future__ import annotations

import asyncio

from scripted_client import text

from inflight_gateway.chunk_turns import ChunkTurns


async def passed(turns: ChunkTurns, order: list[str], name: str) -> None:
    await turns.turn()
    order.append(name)


async def handed_over(order: list[str], name: str, times: int = 2) -> None:
    """From task to task, as a request on its way to Triton."""
    if times:
        await asyncio.create_task(handed_over(order, name, times - 1))
    else:
        order.append(name)


async def test_a_request_that_comes_in_a_burst_passes_all_its_chunks() -> None:
    turns, order = ChunkTurns(), list[str]()
    chunks = [asyncio.create_task(passed(turns, order, "chunk")) for _ in range(12)]
    await asyncio.sleep(0)
    turns.hurry()
    asyncio.get_running_loop().call_soon(asyncio.create_task, handed_over(order, "request", 1))
    await asyncio.gather(*chunks)
    assert order == ["request", *["chunk"] * 12]


async def test_what_becomes_ready_waits_for_a_few_chunks_only() -> None:
    turns, order = ChunkTurns(), list[str]()
    chunks = [asyncio.create_task(passed(turns, order, "chunk")) for _ in range(40)]
    while not order:
        await asyncio.sleep(0)
    await handed_over(order, "other", 1)
    await asyncio.gather(*chunks)
    assert order.index("other") <= 24 and order.count("chunk") == 40


async def test_chunks_pass_however_many_requests_come() -> None:
    turns, order = ChunkTurns(), list[str]()
    chunks = [asyncio.create_task(passed(turns, order, "chunk")) for _ in range(12)]
    for _ in range(70):
        turns.hurry()
        await asyncio.sleep(0)
    assert len(order) == 12
    await asyncio.gather(*chunks)


async def test_chunks_whose_clients_hang_up_in_a_burst_hold_no_other_back() -> None:
    turns, order = ChunkTurns(), list[str]()
    chunks = [asyncio.create_task(passed(turns, order, str(number))) for number in range(32)]
    await asyncio.sleep(0)
    for chunk in chunks[::2]:
        chunk.cancel()
    await asyncio.gather(*chunks, return_exceptions=True)
    assert order == [str(number) for number in range(1, 32, 2)]
    await asyncio.wait_for(turns.turn(), 10)


async def test_a_request_is_in_a_hurry_once_its_body_has_come(start, monkeypatch) -> None:
    hurries = []
    monkeypatch.setattr(ChunkTurns, "hurry", lambda self: hurries.append(len(front.client.streams)))
    front = await start(lambda request: text("a"))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"9\r\n" + b'{"prompt"' + b"\r\n")
    await front.http.get("/health")  # the first part has been read by now, and this request came whole
    assert hurries == [0]
    writer.write(b"6\r\n" + b': "a"}' + b"\r\n0\r\n\r\n")
    assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
    assert hurries == [0, 0], "once its body has come, and before it has gone out"
    writer.close()
