"""Links inside the documentation resolve, headings included, and no page shows a path of somebody's machine."""

from __future__ import annotations

import re
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *(ROOT / "docs").rglob("*.md")]
FILES = sorted(page.relative_to(ROOT).as_posix() for page in PAGES)


def prose(file: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(file: Path) -> set[str]:
    """The headings' anchors, made as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(file), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", FILES)
def test_links_resolve(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name} links to {target}"
        assert file.is_relative_to(ROOT), f"{name} links out of the project: {target}"
        if anchor:
            assert anchor in anchors(file), f"{name} links to {target}; there are {sorted(anchors(file))}"


def test_what_is_promised_of_the_text_is_one_sentence_everywhere() -> None:
    pages = ("README.md", *(f"docs/explanation/{name}.md" for name in ("exactness", "limits", "reliability")))
    texts = (" ".join(prose(ROOT / name).split()) for name in pages)
    said = {re.findall(r"\*\*The text stays the same\*\*: .*? branches of draft trees", text)[0] for text in texts}
    assert len(said) == 1, said


@pytest.mark.parametrize("name", FILES)
def test_no_paths_of_a_machine(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users|usr|opt|mnt|var)/", text)
    assert not re.search(r"[A-Z]:\\", text)
    assert str(ROOT) not in text


#: Pages for those who change the package: what they name and quote is there.
FOR_CONTRIBUTORS = ("CONTRIBUTING.md", "docs/explanation/architecture.md", "docs/how-to/add-to-the-step.md")


@pytest.mark.parametrize("name", FOR_CONTRIBUTORS)
def test_files_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    paths = set(
        re.findall(r"(?<![\w./])((?:decoders|docs|tests|grammars|plugins|\.ci)/[\w./-]*[\w/])", prose(ROOT / name))
    )
    assert paths and [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    quoted = re.findall(
        r"`(decoders/[\w/]+\.py)`[^`]*\n\n<!-- no-test: quoted from the package -->\n```python\n(.*?)```", text, re.S
    )
    for path, lines in quoted:
        assert lines in (ROOT / path).read_text(encoding="utf-8"), f"{path} no longer has what {name} quotes"


def test_figures_for_contributors_are_those_of_the_tests() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert (
        f"hypothesis takes {hypothesis.settings.get_profile('any machine').max_examples} examples, in `.ci/run`" in text
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"the quick tests: (\d+) s", text)
    assert f"Run the tests ({round(int(seconds) / 60)} minutes" in readme


def test_every_page_can_be_reached() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        targets = (t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", prose(page)))
        todo += [(page.parent / t).resolve() for t in targets if t and not re.match(r"https?:", t)]
    assert {ROOT / name for name in FILES} <= reached
