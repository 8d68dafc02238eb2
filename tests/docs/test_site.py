"""The site of the documentation, built strictly as a version and looked at in a real browser."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from ..browser import chromium

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with one version, 1.0, which is the latest."""
    pytest.importorskip("mike", reason="mike, of the extra docs, is not installed")
    repository, folder = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("site")
    who = {f"GIT_{role}_{part}": "docs@localhost" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(*command: str) -> None:
        environment = {**os.environ, **who, "PATH": path, "SITE_DIR": str(folder / "built")}
        done = subprocess.run(command, cwd=repository, env=environment, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr

    run("git", "init", "--quiet")
    run("git", "commit", "--quiet", "--allow-empty", "--message", "what the branch of pages begins from")
    own = ["--config-file", str(ROOT / "mkdocs.yml"), "--branch", "pages"]
    run("mike", "deploy", *own, "--alias-type", "copy", "1.0", "latest")
    run("mike", "set-default", *own, "latest")
    run("git", "worktree", "add", "--quiet", str(folder / "pages"), "pages")
    return folder / "pages"


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


class Html(HTMLParser):
    """What a page links to or loads, and what can be linked to in it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            if name == "id" and value:
                self.anchors.add(value)


def test_every_link_leads_somewhere(site: Path) -> None:
    files = {file.resolve(): Html(file) for file in (site / "latest").rglob("*.html") if file.name != "404.html"}
    wrong = []
    for file, html in files.items():
        for link in html.links:
            path, _, anchor = unquote(link).partition("#")
            if ":" in path:
                continue
            target = (file.parent / path).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target in files and anchor not in files[target].anchors):
                wrong.append(f"{file.relative_to(site)}: {link}")
    assert len(files) > 60
    assert not wrong


def test_the_notebook_was_run(site: Path) -> None:
    """On a CPU its texts are those of transformers; an error in a cell would have ended the build."""
    page = (site / "latest" / "notebooks" / "quickstart" / "index.html").read_text(encoding="utf-8")
    assert page.count("the same text: True") == 2 and "tokens per step" in page and "def volume(self): return" in page
    chart = page.partition('aria-label="number of steps by committed tokens"')[2].partition("</svg>")[0]
    assert "<rect" in chart, "the report's picture is whole"


def test_a_browser_shows_and_searches_it_without_an_error(address: str) -> None:
    with chromium() as browser:
        page, problems = browser.new_page(), []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("response", lambda answer: problems.append(answer.url) if answer.status >= 400 else None)
        page.on(
            "request",
            lambda request: None if request.url.startswith((address, "data:")) else problems.append(request.url),
        )
        page.goto(address)
        page.wait_for_selector(".md-version__current:has-text('1.0')")
        assert page.url == f"{address}latest/"
        page.fill(".md-search__input", "lookahead decoding")
        page.wait_for_selector(".md-search-result__item a[href*='lookahead']", state="attached")
        for name in ("reference/api/", "how-to/serve/", "CHANGELOG/"):
            page.goto(f"{address}latest/{name}")
            page.wait_for_selector("h1")
        assert not problems
