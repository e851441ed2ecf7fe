"""Build the site from the pages of this repository: python tools/build_site.py [FOLDER, default site].

Zensical makes HTML of Markdown.  Its input is laid out here: pages of docs/ at the top, further pages beside
them, programs that pages lead to as pages, the reference from the docstrings (reference.py).  A link that
leads nowhere is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import reference

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "docs" / "site.toml"
STYLE = ROOT / "docs" / "site.css"

BESIDE = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "bench/RESULTS.md": "measured_by_hand.md",
    "tests/capabilities.md": "capabilities.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
"""Pages that are not in docs/, and their places in the site's source."""
GENERATED = "docs/reference.md"
"""Page that leads to files; in the site a page with the docstrings stands in its place."""
_LINK = re.compile(
    r"(?P<before>\]\(|src=\"|href=\")(?P<target>[^)\"#\s]*)(?P<anchor>#[^)\"\s]*)?(?P<after>[)\"])"
)
_CODE = re.compile(r"(?ms)^```.*?^```$|`[^`\n]*`")


def layout(generated: Mapping[str, str]) -> dict[str, str | bytes]:
    """Return the files of the site's source, path to content.

    Raises:
        SystemExit: a link leads to a file that is not there; each is named.
    """
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    waiting = [*BESIDE, *sorted(pages - {GENERATED})]
    files: dict[str, str | bytes] = {}
    lost = []
    for source in waiting:  # grows: programs and pictures are found by the links that lead to them
        for target in _targets(source):
            if not (ROOT / target).is_file():
                lost.append(f"{source} leads to {target}, which is not there")
            elif target not in waiting and target != GENERATED:
                waiting.append(target)
        files[_place(source)] = _content(source)
    if lost:
        raise SystemExit("\n".join(lost))
    return {**files, **generated}


def _place(source: str) -> str:
    """Return where a file of the repository lies in the site's source."""
    place = BESIDE.get(source, source.removeprefix("docs/"))
    return f"{place}.md" if place.endswith((".py", ".yaml")) else place


def _content(source: str) -> str | bytes:
    """Return a page with its links as they are in the site, a program as a page, or another file's bytes."""
    name = source.rpartition("/")[2]
    if name.endswith(".md"):
        return _LINK.sub(lambda link: _moved(link, source), (ROOT / source).read_text())
    if name.endswith((".py", ".yaml")) or name == "LICENSE":
        kind = "text" if name == "LICENSE" else name.rpartition(".")[2]
        return f"# {name}\n\n```{kind}\n{(ROOT / source).read_text()}```\n"
    return (ROOT / source).read_bytes()


def _targets(source: str) -> Iterator[str]:
    """Yield the files to which a page leads."""
    if source.endswith(".md"):
        for link in _LINK.finditer(_CODE.sub("", (ROOT / source).read_text())):
            if link["target"] and ":" not in link["target"]:
                yield _resolved(source, link["target"])


def _resolved(source: str, target: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(source), target))


def _moved(link: re.Match[str], source: str) -> str:
    target = _resolved(source, link["target"])
    if not link["target"] or not (ROOT / target).is_file():  # a place in this page, another site, code
        return link[0]
    there = os.path.relpath(_place(target), os.path.dirname(_place(source)) or ".")
    return f"{link['before']}{there}{link['anchor'] or ''}{link['after']}"


def settings() -> str:
    """Return Zensical's settings, with the pages of the guide that they do not name."""
    text = SETTINGS.read_text()
    further = [page for page in sorted((ROOT / "docs" / "guide").glob("*.md")) if page.name not in text]
    titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in further]
    lines = [
        f'    {{ "{title}" = "guide/{page.name}" }},\n' for title, page in zip(titles, further, strict=True)
    ]
    return re.sub(r"(?m)^ *# further pages of guide/.*\n", "".join(lines), text)


def build(folder: Path) -> None:
    """Write the site's source into a temporary folder, and the site into `folder`."""
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        for place, content in layout(reference.pages()).items():
            file = work / "source" / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        (work / "zensical.toml").write_text(settings())
        shutil.copy(STYLE, work / "source")
        zensical = Path(sys.executable).with_name("zensical")
        subprocess.run([zensical, "build", "--strict"], cwd=work, check=True)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work / "site", folder)


if __name__ == "__main__":
    build(Path(sys.argv[1] if sys.argv[1:] else "site").absolute())
