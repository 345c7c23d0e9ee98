"""The status page in a real browser, over the bundled model."""

from __future__ import annotations

import asyncio
import json
import re
from urllib.parse import urlparse

import httpx
import pytest

from sglang.test.browser import Page, find_chromium
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer, write_front_end_model

register_cpu_ci(est_time=30, suite="e2e")

CONTRAST = """(() => {
  const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map((v) => {
    const x = v / 255; return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const back = (n) => { for (; n; n = n.parentElement) {
    const c = getComputedStyle(n).backgroundColor; if (c !== "rgba(0, 0, 0, 0)") return c; } };
  const ratio = (n) => { const a = light(getComputedStyle(n).color) + 0.05, b = light(back(n)) + 0.05;
    return Math.max(a, b) / Math.min(a, b); };
  return Math.min(...[...document.querySelectorAll("h1, h2, p, label, .token, td, figcaption, button:enabled")]
    .filter((n) => n.offsetParent && n.textContent).map(ratio)); })()"""
NAMELESS = """[...document.querySelectorAll("input, textarea, button, [role=img], [role=log]")]
  .filter((n) => !(n.labels && n.labels.length) && !n.ariaLabel && !n.textContent).length"""


@pytest.fixture(scope="module")
def server():
    flags = ("--speculative-algorithm", "NEXTN", "--enable-linear-lossless-verify")
    with FakeServer(
        "demo", "--max-total-tokens", "4096", *flags, module="sglang.launch_server"
    ) as running:
        yield running.wait_ready(60)


def with_page(url, steps):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed")

    async def run():
        async with Page(program) as page:
            await page.call("Page.navigate", url=url)
            await steps(page)
            return page.events

    return asyncio.run(run())


def test_page_shows_the_server_and_colours_accepted_drafts(server):
    """Catches a dead page, a prompt box that only a mouse reaches, wrongly coloured tokens, text
    that cannot be read in one of the two schemes, and anything fetched from elsewhere."""
    body = {
        "text": "The captain looked at the sea and",
        "sampling_params": {"max_new_tokens": 96, "temperature": 0},
        "return_step_lengths": True,
    }
    want = httpx.post(server.url + "/generate", json=body, timeout=60).json()
    lengths = want["meta_info"]["step_lengths"]
    assert sum(lengths) == want["meta_info"]["completion_tokens"] and max(lengths) > 1

    async def steps(page):
        await page.wait_for("document.title.startsWith('demo')")
        assert await page.value("document.querySelectorAll('.bar').length") == 2
        assert await page.value("document.querySelectorAll('.bar .freed').length") == 1
        assert "frees" in await page.value("document.querySelector('#freed').textContent")
        for _ in range(12):  # the keyboard alone gets to the prompt and sends it
            await page.press("Tab", code=9)
            if await page.value("document.activeElement.id") == "prompt":
                break
        assert await page.value("document.activeElement.id") == "prompt"
        await page.press("Enter", code=13, control=True)
        await page.wait_for("document.querySelector('#summary').textContent.includes('ended by')")
        assert await page.value("document.querySelector('#answer').textContent") == want["text"]
        colours = await page.value(
            "[...document.querySelectorAll('#answer span')].map((s) => s.matches('.accepted'))"
        )
        own = [at + 1 == length for length in lengths for at in range(length)]
        assert colours == [not is_own for is_own in own]
        await page.wait_for("document.querySelector('#accept-value').textContent > '1'")
        assert await page.value(NAMELESS) == 0
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            await page.call("Emulation.setEmulatedMedia", features=features)
            assert await page.value(CONTRAST) > 4.5, scheme

    events = with_page(server.url + "/", steps)
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    hosts = {urlparse(url).netloc for url in asked if not url.startswith("data:")}
    assert hosts == {urlparse(server.url).netloc}
    bad = [e for e in events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    assert not bad, bad


def test_escape_stops_the_answer(server):
    """Catches a prompt box that leaves its request running (F87)."""

    async def steps(page):
        await page.wait_for("document.title.startsWith('demo')")
        await page.value("document.querySelector('#max-tokens').value = 3000")
        await page.value("document.querySelector('#prompt').focus()")
        await page.press("Enter", code=13, control=True)
        await page.wait_for("document.querySelectorAll('#answer span').length > 5")
        await page.press("Escape", code=27)
        await page.wait_for("document.querySelector('#summary').textContent.includes('Stopped')")
        assert await page.value("document.querySelector('#send').disabled") is False
        await page.wait_for("document.querySelector('#running-value').textContent === '0'")

    with_page(server.url + "/", steps)


def test_files_need_no_key_and_tell_nothing(tmp_path):
    """Catches a page that is locked with the key it asks for, or data that is not."""
    model = write_front_end_model(tmp_path / "model")
    with FakeServer(model, "--api-key", "secret", "--served-model-name", "model") as running:
        running.wait_ready()
        for path, kind in (("/", "html"), ("/status.js", "javascript"), ("/status.css", "css")):
            reply = httpx.get(running.url + path)
            assert reply.status_code == 200 and kind in reply.headers["content-type"]
            assert "default-src 'self'" in reply.headers["content-security-policy"]
            assert not re.search(r"(https?:)?//\w+\.\w+", reply.text.replace("www.w3.org", ""))
        assert httpx.get(running.url + "/server_info").status_code == 401
        assert httpx.get(running.url + "/status.txt").status_code in (401, 404)

        async def steps(page):
            await page.wait_for("document.querySelector('#key-form')?.hidden === false")
            await page.value("document.querySelector('#key').value = 'secret'")
            await page.value("document.querySelector('#key-form').requestSubmit()")
            await page.wait_for(f"document.title.startsWith({json.dumps('model')})")

        with_page(running.url + "/", steps)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
