"""The page at ``/`` in a real browser."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ..browser import chromium

pytest.importorskip("fastapi")


#: Pixels that the longest name leaves of a field's width, its arrow and borders taken off.
FREE = """id => {
  const field = document.getElementById(id), style = getComputedStyle(field), pen = document.createElement("canvas").getContext("2d");
  pen.font = style.font;
  return field.clientWidth - 36 - Math.max(...[...field.options].map(each => pen.measureText(each.text).width));
}"""


def test_the_page_has_nothing_from_elsewhere(client: Any) -> None:
    response = client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"https?:|//[a-z]", re.sub(r"//.*(?=\n)", "", response.text))
    labels = set(re.findall(r'<label for="(\w+)"', response.text))
    fields = set(re.findall(r'<(?:input|select|textarea) id="(\w+)"', response.text))
    assert fields and fields == labels


@pytest.mark.slow
def test_the_page_shows_a_text_with_its_drafted_tokens(client: Any) -> None:
    with chromium() as browser:
        page, problems = browser.new_page(), []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(str(client.base_url))
        page.wait_for_selector("#strategy option:nth-child(4)", state="attached")
        assert page.text_content("#model") == "tiny"
        # Strategies that have no draft model or heads here are not among them; no name is cut.
        names = page.eval_on_selector_all("#strategy option", "all => all.map(each => each.value)")
        assert "prompt_lookup" in names and not {"speculative", "medusa", "eagle3", "mtp", "dflash"} & {*names}
        for field in ("strategy", "other"):
            assert page.evaluate(FREE, field) >= 0, f"names of {field} are cut"
        # By keyboard alone: the prompt is the first field, Ctrl+Enter generates.
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.keyboard.press("Control+A")
        page.keyboard.type("abcabcabcabc")
        page.select_option("#strategy", "lookahead")  # whose drafts are verified whole, whatever steps cost
        page.fill("#tokens", "80")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#status:has-text('Done')")
        assert re.match(r"80 tokens in [\d.]+ s, [\d.]+ tokens/s, \d+ steps, ", page.text_content("#figures") or "")
        body = {"prompt": "abcabcabcabc", "max_tokens": 80, "temperature": 0, "seed": 0}
        expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert page.evaluate("document.querySelector('#text').textContent") == expected
        assert page.locator("#text .drafted").count() > 0
        drafted = page.evaluate("getComputedStyle(document.querySelector('#text .drafted')).color")
        plain = page.evaluate("getComputedStyle(document.querySelector('#text')).color")
        assert drafted != plain
        # Another strategy beside it, and a grammar for both.
        page.select_option("#other", "autoregressive")
        page.select_option("#kind", "regex")
        page.fill("#grammar", "[a-c]{9}")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#status:has-text('the texts are the same')")
        first, second = page.text_content("#text"), page.text_content("#second")
        assert first == second and re.fullmatch("[a-c]{9}", first)
        assert page.text_content("#second-title") == "autoregressive" and "tokens/s" in page.text_content("#others")
        page.select_option("#kind", "json_schema")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#status[data-error]:has-text('the schema is not JSON')")
        page.select_option("#kind", "")
        page.fill("#tokens", "1")
        page.fill("#prompt", "a" * 1000)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#status[data-error]:has-text('the limit is 300')")
        # What a text holds is never markup.
        page.evaluate("show($('text'), [{text: '<img src=x onerror=alert(1)>', drafted: true}])")
        assert page.locator("#text img").count() == 0
        assert [problem for problem in problems if "400" not in problem] == []


def test_strategies_with_a_draft_model_are_listed_where_there_is_one(service_of: Any, llama: Any) -> None:
    service = service_of(assistant=llama)
    assert {"speculative", "threshold", "staged", "grammar"} <= {*service.offered.names}
    service.close()
