"""What makes a site of docs/: mkdocs calls these functions (``hooks`` in mkdocs.yml).

The pages are written for GitHub, whose links lead to any file of the repository. The site's home is the README, its navigation
the list in docs/README.md; files outside of docs/ that pages link to become pages, too, sources in a block of code.
"""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import ExecutePreprocessor

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2$", re.M | re.S)


serving = False


def place(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in ("README.md", "docs/README.md"):
        return "index.md" if path == "README.md" else "contents.md"
    inner = path.removeprefix("docs/")
    if inner.endswith(".ipynb"):
        return inner.removesuffix(".ipynb") + ".md"
    return inner if inner != path or inner.endswith(".md") else f"{inner}.md"


def text_of(path: str) -> str:
    """A file as Markdown."""
    if path.endswith(".ipynb"):
        return executed(path)
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# {path}\n\n````{Path(path).suffix[1:] or 'text'}\n{text}\n````\n"


@functools.cache
def executed(path: str) -> str:
    """A notebook as Markdown, with what its cells write now: an error in one ends the build."""
    notebook = nbformat.read(ROOT / path, 4)
    if not serving:
        ExecutePreprocessor(timeout=600).preprocess(notebook, {"metadata": {"path": str(ROOT)}})
    for cell in notebook.cells:
        cell.outputs = [each for each in cell.get("outputs", ()) if each.get("name") != "stderr"]
        for data in (each.data for each in cell.outputs if "text/html" in each.get("data", {})):
            data["text/html"] = f"<div>{data['text/html']}</div>"  # one block, or Python-Markdown takes pictures apart
    return str(MarkdownExporter().from_notebook_node(notebook)[0])


def on_startup(command: str, dirty: bool) -> None:
    """Pages that are shown while they are written have notebooks without outputs."""
    global serving
    serving = command == "serve"


def links(path: str) -> list[str]:
    """Files of the repository that a page links to."""
    targets = LINK.findall(FENCE.sub("", text_of(path))) if path.endswith(".md") else []
    return [resolved(path, target) for target in targets if ":" not in target]


def resolved(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def pages() -> set[str]:
    """Whatever can be reached from the README."""
    found, todo = set(), ["README.md"]
    while todo:
        path = todo.pop()
        if path not in found and (ROOT / path).is_file():
            found.add(path)
            todo += links(path)
    return {path for path in found if not path.endswith(".svg")}


SOURCES = {place(path): path for path in sorted(pages())}


def on_config(config: MkDocsConfig) -> None:
    """The navigation: one section for each entry of the list in docs/README.md."""
    entries = re.split(r"^- ", (ROOT / "docs/README.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    config.nav = ["index.md"]
    for entry in entries:
        title, _, rest = entry.partition("**")[2].partition("**")
        inner = [
            {text[:1].upper() + text[1:]: place(resolved("docs/README.md", target))}
            for text, target in re.findall(r"\[([^\]]+)\]\(([^)\s#]+)\)", rest)
        ]
        if own := re.match(r"\[(.*)\]\((.*)\)", title):
            folder = Path(own[2]).parent.as_posix()
            others = sorted(name for name in SOURCES if folder != "." and name.startswith(f"{folder}/"))
            config.nav += [{own[1]: others}] if others else [{own[1]: own[2]}, *inner]
        else:
            config.nav.append({title: inner})
    listed = str(config.nav)
    rest = [name for name in SOURCES if f"'{name}'" not in listed and SOURCES[name].endswith((".md", ".ipynb"))]
    config.nav.append({"Project": rest})


def on_files(files: Files, config: MkDocsConfig) -> None:
    for name, path in SOURCES.items():
        if (old := files.get_file_from_path(path.removeprefix("docs/"))) and path.endswith(".md"):
            files.remove(old)
        made = File.generated(config, name, content=text_of(path))
        files.append(made)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to where the site has a file, and indents lists as Python-Markdown wants it: by four."""
    path = SOURCES[page.file.src_uri]
    if path.endswith(".ipynb"):  # its outputs are code that is indented, and HTML
        return markdown

    def led(match: re.Match[str]) -> str:
        if ":" in match[1]:
            return match[1]
        target = resolved(path, match[1])
        target = target.removeprefix("docs/") if target.endswith(".svg") else place(target)
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    parts, last = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [indented(LINK.sub(led, markdown[last : fence.start()])), shifted(fence[0], len(fence[1]))]
        last = fence.end()
    return "".join([*parts, indented(LINK.sub(led, markdown[last:]))])


def indented(text: str) -> str:
    return re.sub(r"^ +(?=\S)", lambda match: " " * widened(len(match[0])), text, flags=re.M)


def shifted(fence: str, indentation: int) -> str:
    return re.sub(r"^(?=.)", " " * (widened(indentation) - indentation), fence, flags=re.M)


def widened(indentation: int) -> int:
    """Spaces that begin a line at the depth at which `indentation` has it: two or three are one level."""
    return 4 * (indentation // 2)
