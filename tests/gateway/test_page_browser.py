"""The page in Chromium, against a gateway with a scripted backend.  Takes `chromium` and the package playwright."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from scripted_client import ScriptedClient, text

from inflight_client import DeadlineExceededError, InvalidRequestError, ServerUnreachableError, UnavailableError

playwright = pytest.importorskip("playwright.async_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]

DESKTOP, PHONE, SMALLEST = {"width": 1360, "height": 850}, {"width": 390, "height": 844}, {"width": 320, "height": 640}
DONE = ".assistant:last-of-type[aria-busy=false]"
LAST = ".assistant:last-of-type"
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><b>bold</b>

[a](javascript:window.hacked=3) [b](https://b.example/"onclick="x) [c](data:text/html,x) ![d](https://d.example/x.png)

```html
</code></pre><script>window.hacked = 4</script>
```

| <i>x</i> | `<u>y</u>` |
"""


@pytest.fixture
async def open_page() -> AsyncIterator[Callable[..., Any]]:
    """`await open_page(url)`: a page that must report no error of a script and no breach of the policy."""
    faults: list[str] = []
    async with playwright.async_playwright() as library:
        browser = await library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        async def begin(url: str, viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> Any:
            context = await browser.new_context(viewport=viewport, color_scheme=scheme)
            page = await context.new_page()
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("console", lambda said: faults.append(said.text) if "Policy" in said.text else None)
            page.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
            await page.goto(url)
            return page

        yield begin
        await browser.close()
    assert not faults, faults


async def ask(page: Any, message: str, until: str = DONE) -> None:
    await page.fill("#prompt", message)
    await page.press("#prompt", "Enter")
    await page.wait_for_selector(until)


async def health(page: Any, text: str) -> None:
    await page.wait_for_function("text => document.querySelector('#health').textContent === text", arg=text)


async def said(page: Any, text: str) -> None:
    """Wait until the live region for screen readers has a text."""
    await page.wait_for_function("text => document.querySelector('#announce').textContent.includes(text)", arg=text)


async def test_a_message_is_answered_as_the_text_comes(start, open_page):
    go_on = asyncio.Event()
    front = await start(lambda request: [*text("Hello", finish=None), go_on, *text(", **world**.\n\nBye.")])
    page = await open_page(front.url)
    await health(page, "Ready")
    await page.fill("#system", "Be brief.")
    await page.fill("#temperature", "0.5")
    await page.fill("#max-tokens", "7")
    await ask(page, "Hi <there>", f"{LAST} p:text-is('Hello')")
    assert await page.get_attribute(LAST, "aria-busy") == "true" and await page.is_visible("#stop")
    go_on.set()
    await page.wait_for_selector(DONE)
    assert await page.inner_text(f"{LAST} strong") == "world" and await page.is_visible("#send")
    assert "first after" in await page.inner_text(f"{LAST} footer")
    await said(page, "Hello, **world**.")
    await said(page, "The answer is complete")
    await ask(page, "More", ".assistant:nth-of-type(4)[aria-busy=false]")
    first, second = front.client.requests
    assert [one["role"] for one in second.messages] == ["system", "user", "assistant", "user"]
    assert (
        second.messages[1]["content"] == "Hi <there>" and second.messages[2]["content"] == "Hello, **world**.\n\nBye."
    )
    assert first.sampling["temperature"] == 0.5 and first.sampling["max_tokens"] == 7
    await page.click("#new-chat")
    assert await page.locator(".turn").count() == 0 and await page.is_visible("#empty")


async def test_an_answer_is_stopped(start, open_page):
    front = await start(lambda request: [*text("Some", finish=None), asyncio.Event()])
    page = await open_page(front.url)
    await ask(page, "Hi", f"{LAST} p:text-is('Some')")
    await page.click("#stop")
    await page.wait_for_selector(DONE)
    assert "Stopped" in await page.inner_text(f"{LAST} .notice") and "Some" in await page.inner_text(LAST)
    await asyncio.wait_for(front.client.streams[0].cancelled.wait(), 20)  # at Triton, too


async def test_output_never_becomes_html(start, open_page):
    parts = [HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)]
    front = await start(lambda request: text(*parts))
    page = await open_page(front.url)
    await ask(page, HOSTILE)
    assert await page.evaluate("window.hacked") is None
    inside = page.locator(".turn")
    assert await inside.locator("script, img, b, i, u, [onerror], [onclick]").count() == 0
    links = await inside.locator("a").evaluate_all("links => links.map(({href, rel}) => [href, rel])")
    assert {href.split("/")[2] for href, _ in links} == {"b.example", "d.example"}
    assert all(href.startswith("https://") and "noopener" in rel for href, rel in links)
    assert "<script>window.hacked = 1</script>" in await page.inner_text(f"{LAST} .content")


@pytest.mark.parametrize("pattern", ["> ", "[", "*a ", "`", "- a\n", "|a", "# ", "**a "])
async def test_no_text_takes_long(start, open_page, pattern):
    front = await start(lambda request: text(pattern * 20_000))
    page = await open_page(front.url)
    await ask(page, "Hi")
    assert len(await page.inner_text(f"{LAST} .content")) > 10_000


@pytest.mark.parametrize("part", ["word ", "a line\n", "a paragraph\n\n", "```\n"])
async def test_the_page_works_during_a_huge_answer(start, open_page, part):
    go_on = asyncio.Event()
    count = 5000
    front = await start(lambda request: [*text(*[part] * count, finish=None), go_on, *text(*[part] * count, "end")])
    page = await open_page(front.url)
    await page.fill("#prompt", "Hi")
    await page.press("#prompt", "Enter")
    go_on.set()
    await page.fill("#system", "typed while it streams")  # it waits for the page's main thread
    await page.wait_for_selector(DONE)
    assert f"{2 * count + 1} tokens" in await page.inner_text(f"{LAST} footer")
    assert (await page.inner_text(f"{LAST} .content")).rstrip().endswith("end")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (InvalidRequestError("max_tokens=0: must be at least 1"), "The request is not valid: max_tokens=0"),
        (UnavailableError("the queue is full"), "The server is busy: the queue is full. Try again in 1 s."),
        (UnavailableError("the model is draining"), "No model can answer now: the model is draining"),
        (DeadlineExceededError("deadline exceeded"), "The time is up"),
        (KeyError("a fault"), "The server has a fault"),
    ],
)
async def test_errors_are_shown_in_words(start, open_page, error, says):
    answers = [[error], text("Now it works.")]
    front = await start(lambda request: answers.pop(0))
    page = await open_page(front.url)
    await ask(page, "Hi")
    assert says in await page.inner_text(f"{LAST} [role=alert]")
    await page.click("button:text-is('Try again')")
    await page.wait_for_selector(f"{LAST} p:text-is('Now it works.')")
    assert [len(one.messages) for one in front.client.requests] == [1, 1]


async def test_a_message_that_failed_is_not_sent_with_the_next(start, open_page):
    answers = [[InvalidRequestError("too long")], text("Fine.")]
    front = await start(lambda request: answers.pop(0))
    page = await open_page(front.url)
    await ask(page, "a long text")
    await ask(page, "a short one", f"{LAST} p:text-is('Fine.')")
    assert [one["content"] for one in front.client.requests[-1].messages] == ["a short one"]


async def test_a_server_that_dies_in_a_stream_is_shown(start, open_page):
    front = await start(lambda request: [*text("Some", finish=None), ServerUnreachableError("lost the connection")])
    page = await open_page(front.url)
    await ask(page, "Hi")
    shown = await page.inner_text(LAST)
    assert "Some" in shown and "Interrupted: lost the connection. The answer is not complete." in shown


async def test_a_gateway_that_dies_is_shown(start, open_page):
    held = asyncio.Event()
    front = await start(lambda request: [*text("Some", finish=None), held])
    page = await open_page(front.url)
    await health(page, "Ready")
    await ask(page, "Hi", f"{LAST} p:text-is('Some')")
    await front.shutdown()
    await page.wait_for_selector(DONE)
    assert "The answer is not complete." in await page.inner_text(LAST)
    await health(page, "No answer")
    await ask(page, "Again", f"{LAST} >> text=No connection")


async def test_a_key_is_asked_for_and_kept_in_the_tab(start, open_page):
    front = await start(lambda request: text("Hello"), api_keys=("right-key",))
    page = await open_page(front.url)
    await page.wait_for_selector("dialog[open] >> text=asks for a key")
    await page.fill("#key", "кл юч")
    await page.press("#key", "Enter")
    assert "ASCII" in await page.inner_text("#key-error")
    await page.fill("#key", "wrong-key")
    await page.press("#key", "Enter")
    await page.wait_for_selector("dialog[open] >> text=does not accept this key")
    await page.press("#key", "Escape")
    await health(page, "Needs a key")
    await page.click("text=the API key")
    await page.fill("#key", "right-key")
    await page.press("#key", "Enter")
    await health(page, "Ready")
    await ask(page, "Hi")
    await page.goto(f"{front.url}/docs")
    await page.wait_for_selector("summary:has-text('/v1/chat/completions')")
    assert await page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    await page.reload()
    await page.wait_for_selector("details.endpoint")


async def test_tools_are_called_and_their_results_sent(start, open_page):
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "<b>Lisbon</b>"}}\n</tool_call>'
    answers = [text(call), text("17 degrees.")]
    client = ScriptedClient(lambda request: answers.pop(0))
    client.info["tool_format"] = "hermes"
    front = await start(client)
    page = await open_page(front.url)
    await page.fill("#tools", "{not json")
    await ask(page, "Weather?", "#tools-error:not(:empty)")
    assert not client.requests and await page.input_value("#prompt") == "Weather?"
    await page.click("[data-example=tools]")
    await ask(page, "Weather?")
    assert await page.inner_text(".call h4 code") == "get_weather"
    assert '"city": "<b>Lisbon</b>"' in await page.inner_text(".call pre")
    await page.fill(".call textarea", "17")
    await page.click("text=Send the results")
    await page.wait_for_selector(f"{LAST} p:text-is('17 degrees.')")
    sent = client.requests[-1].messages
    assert [one["role"] for one in sent] == ["user", "assistant", "tool"] and sent[2]["content"] == "17"
    assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"]


async def test_json_is_asked_for_and_indented(start, open_page):
    front = await start(lambda request: text('{"id": 12345678901234567890,', ' "a":[], "b":["<i>",1.0]}'))
    page = await open_page(front.url)
    await page.select_option("#format", "json_schema")
    await page.click("[data-example=schema]")
    await ask(page, "Hi")
    shown = await page.inner_text(f"{LAST} pre")
    assert shown == '{\n  "id": 12345678901234567890,\n  "a": [],\n  "b": [\n    "<i>",\n    1.0\n  ]\n}'
    assert "json" in str(front.client.requests[0].sampling).lower()
    await page.select_option("#format", "json_object")
    await ask(page, "Hi", ".assistant:nth-of-type(4)[aria-busy=false]")


async def test_reasoning_is_shown_collapsed(start, open_page):
    client = ScriptedClient(lambda request: text("<think>", "Let me see.", "</think>", "Done."))
    client.info["reasoning_tags"] = ["<think>", "</think>"]
    front = await start(client)
    page = await open_page(front.url)
    await health(page, "Ready")
    await page.wait_for_selector("#thinking")
    await page.select_option("#thinking", "on")
    await ask(page, "Hi")
    assert await page.inner_text(f"{LAST} .content") == "Done."
    assert not await page.is_visible("text=Let me see.")
    await page.click("summary >> text=Reasoned for")
    assert await page.is_visible("text=Let me see.")


async def test_the_state_of_models_and_replicas(start, open_page):
    gone, hangs = ScriptedClient(lambda request: []), ScriptedClient(lambda request: [])
    gone.is_live, hangs.stats = False, DeadlineExceededError("no answer")
    client = ScriptedClient(lambda request: text("a"), ["first", "second"])
    triton = ("a.example:8001", "b.example:8001", "c.example:8001")
    front = await start(client, replicas={triton[1]: gone, triton[2]: hangs}, triton=triton)
    page = await open_page(front.url)
    await health(page, "1 of 3 down")
    shown = await page.inner_text("#tritons")
    assert all(address in shown for address in triton) and "unresponsive" in shown and "down" in shown
    assert [await page.inner_text(f"#{name}") for name in ("running", "waiting", "kv", "hits")] == [
        "6",
        "2",
        "23%",
        "62%",
    ]
    assert await page.locator("#model option").all_inner_texts() == ["first", "second"]
    await page.select_option("#model", "second")
    await ask(page, "Hi")
    assert front.client.requests[0].model == "second"
    await page.reload()
    await health(page, "1 of 3 down")
    assert await page.input_value("#model") == "second", "the tab remembers it"
    client.inputs.clear()
    await health(page, "No model is ready")
    assert await page.is_visible("#problem")


async def test_the_rate_of_tokens(start, open_page):
    client = ScriptedClient(lambda request: [])
    front = await start(client, triton=("a:1",))
    page = await open_page("about:blank")
    await page.goto(f"{front.url}/docs")
    code = """async (looks) => {
        const { Rates } = await import('./page/rates.js');
        const rates = new Rates();
        return looks.map(([time, counts]) => {
            const loads = Object.entries(counts).map(
                ([address, generation_tokens]) => ({ address, generation_tokens }));
            rates.take(time, loads);
            return rates.total(loads);
        });
    }"""
    looks: list[Any] = [
        [0, {"a": 0, "b": 50}],
        [2, {"a": 20, "b": 50}],
        [2, {"a": 20, "b": 50}],  # the same look again
        [4, {"a": 40, "b": 90}],
        [6, {"a": 3, "b": 130}],  # restarted
        [60, {"a": 500, "b": 200}],  # no look for a minute
        [10, {"a": 600}],  # another machine's clock
        [12, {"a": None}],
    ]
    assert await page.evaluate(code, looks) == [None, 10, 10, 20, pytest.approx(80 / 6), None, None, None]


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE, SMALLEST])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_and_can_be_read(start, open_page, viewport, scheme):
    wide = "```\n" + "x" * 300 + "\n```\n\n" + "y" * 300 + "\n\n|" + "cell|" * 40 + "\n"
    front = await start(lambda request: text(wide))
    page = await open_page(front.url, viewport, scheme)
    await ask(page, "z" * 300)
    for path in ("/", "/docs"):
        overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, path
        await page.goto(front.url + "/docs")
        await page.wait_for_selector("details.endpoint")
    await page.goto(front.url)
    await health(page, "Ready")
    if viewport is not DESKTOP:
        assert not await page.is_visible("#server") and not await page.is_visible("#settings")
        for name in ("server", "settings"):
            await page.click(f"#show-{name}")
            assert await page.is_visible(f"#{name}")
            assert await page.get_attribute(f"#show-{name}", "aria-expanded") == "true"
        await page.press("#system", "Escape")
        assert not await page.is_visible("#settings")
    assert await page.evaluate(CONTRASTS) == []


# Texts with a contrast below WCAG's AA, 4.5 to 1.
CONTRASTS = """() => {
    const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const behind = (element) => {
        for (; element; element = element.parentElement) {
            const color = rgb(getComputedStyle(element).backgroundColor);
            if (color.length === 3 || color[3] > 0) return color;
        }
        return [255, 255, 255];
    };
    const texts = [...document.querySelectorAll('body *')].filter((one) => one.checkVisibility() &&
        [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && one.tagName !== 'NOSCRIPT');
    return texts.filter((one) => {
        const [a, b] = [light(rgb(getComputedStyle(one).color)), light(behind(one))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05) < 4.5;
    }).map((one) => one.outerHTML);
}"""


async def test_the_docs_show_keys_and_send_requests(start, open_page):
    front = await start(lambda request: text("Hello"))
    page = await open_page(f"{front.url}/docs")
    await page.fill("#filter", "top_k")
    await page.click("details.endpoint:visible >> nth=0 >> summary")
    found = page.locator("details.endpoint[open]")
    assert await found.locator("tr.found td").first.inner_text() == "top_k"
    assert "curl" in await found.inner_text() and '"model": "demo"' in await found.locator("textarea").input_value()
    await found.locator("text=Send").click()
    await found.locator("pre >> text=Hello").wait_for()
    await found.locator("textarea").fill("{")
    await found.locator("text=Send").click()
    await found.locator("text=The request is not valid").wait_for()


async def test_a_command_for_the_same_request_is_copied(start, open_page):
    front = await start(lambda request: text("Hello"), api_keys=("right-key",))
    page = await open_page(front.url)
    await page.wait_for_selector("dialog[open]")
    await page.fill("#key", "right-key")
    await page.press("#key", "Enter")
    await health(page, "Ready")
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.fill("#prompt", "it's")
    await page.click("#copy-curl")
    copied = await page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"curl {front.url}/v1/chat/completions") and "it'\\''s" in copied
    assert "$INFLIGHT_API_KEY" in copied and "right-key" not in copied
