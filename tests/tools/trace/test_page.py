"""The HTML page in a real browser: its script runs and fills the page."""

from __future__ import annotations

import html
import re
import shutil
import subprocess

import pytest
from drafters import HashDrafter
from engine_rig import Info, add, make_core, run_until_idle

from inflight_tools.trace.html import timeline_html
from inflight_tools.trace.timeline import build_timeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_draws_its_data(tmp_path):
    core = make_core(
        Info(max_model_len=40, num_blocks=10), step_trace=True, block_size=4, max_num_seqs=8, max_num_batched_tokens=16
    )
    core.scheduler.policies.drafter = drafter = HashDrafter("half", 3)
    for request_id in range(12):
        add(core, request_id, [1 + request_id] * 9, max_tokens=4 + request_id, ignore_eos=True)
    run_until_idle(core, {}, {})
    assert core.scheduler.num_preempted_total > 1
    page = tmp_path / "page.html"
    timeline = build_timeline(core.trace.snapshot())
    # An error of the script must show up in the title.
    caught = "<script>addEventListener('error', (e) => { document.title = 'error: ' + e.message; })</script>"
    page.write_text(timeline_html(timeline, "tests & <b>").replace("<head>", "<head>" + caught))
    # Rows are drawn in an animation frame; a browser short of CPU time may print the page before its first one.
    for _ in range(4):
        done = subprocess.run(
            [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
             "--run-all-compositor-stages-before-draw", "--virtual-time-budget=20000", "--dump-dom", page.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        title = re.search(r"<title>(.*?)</title>", done.stdout)
        assert title is not None
        assert html.unescape(title[1]) == "Step trace of tests & <b>"
        text = html.unescape(re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL))
        if "A row for each of 12 requests" in text:
            break
    assert f"12 requests, {len(timeline.steps)} steps, {core.scheduler.num_preempted_total} preemptions" in text
    assert "All 12 requests in batches of 8, in order of arrival" in text
    assert "of the iterations of occupied slots idle in static batches" in text
    assert "for the same 12 requests: steps of the engine, and static batches of 8 (both computed)" in text
    assert f"{timeline.num_output_tokens} output tokens in" in text
    assert "A row for each of 12 requests" in text, "the rows were drawn"
    assert f"of {drafter.num_drafts} drafts accepted" in text
    assert text.count("<tr>") == 13, "the table for readers who cannot see the picture"
