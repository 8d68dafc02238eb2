"""The page at ``/`` in a real browser."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ..browser import chromium

pytest.importorskip("fastapi")


def test_the_page_has_nothing_from_elsewhere(client: Any) -> None:
    response = client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"https?:|//[a-z]", re.sub(r"//.*(?=\n)", "", response.text))
    labels = set(re.findall(r'<label for="(\w+)"', response.text))
    fields = set(re.findall(r'<(?:input|select|textarea) id="(\w+)"', response.text))
    assert fields and fields == labels


def test_the_page_shows_a_text_with_its_drafted_tokens(client: Any) -> None:
    with chromium() as browser:
        page, problems = browser.new_page(), []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(str(client.base_url))
        page.wait_for_selector("#strategy option:nth-child(4)", state="attached")
        assert page.text_content("#model") == "tiny"
        # By keyboard alone: the prompt is the first field, Ctrl+Enter generates.
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.keyboard.press("Control+A")
        page.keyboard.type("abcabcabcabc")
        page.select_option("#strategy", "lookahead")  # whose drafts are verified whole, whatever steps cost
        page.fill("#tokens", "80")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#status:has-text('steps')")
        body = {"prompt": "abcabcabcabc", "max_tokens": 80, "temperature": 0, "seed": 0}
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert page.evaluate("document.querySelector('#text').textContent") == expected
        assert page.locator("#text .drafted").count() > 0
        drafted = page.evaluate("getComputedStyle(document.querySelector('#text .drafted')).color")
        plain = page.evaluate("getComputedStyle(document.querySelector('#text')).color")
        assert drafted != plain
        page.fill("#tokens", "1")
        page.fill("#prompt", "a" * 1000)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#status[data-error]")
        assert "the limit is 300" in (page.text_content("#status") or "")
        # What a text holds is never markup.
        page.evaluate("show([{text: '<img src=x onerror=alert(1)>', drafted: true}])")
        assert page.locator("#text img").count() == 0
        assert [problem for problem in problems if "400" not in problem] == []
