"""Brings what lies outside of docs/ into the site: results of measurements, and the files at the root.

Links in the documents are those that work in the repository; a page of the site has them as it needs them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "README.zh-CN.md")


def placed(target: str) -> str | None:
    """Where the site has a file of the repository, below its root; None where it has none."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target == "README.md":
        return "index.md"
    if target in BESIDE:
        return f"project/{target}"
    if target.startswith("benchmarks/") and target.endswith(".md"):
        return f"project/{target}"
    return None


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside of docs/, and the pictures of results."""
    results = sorted((ROOT / "benchmarks").rglob("*.md"))
    for name in [*BESIDE, *(str(path.relative_to(ROOT)) for path in results)]:
        if (ROOT / name).exists():
            text = (ROOT / name).read_text(encoding="utf-8")
            files.append(File.generated(config, f"project/{name}", content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        name = f"project/{picture.relative_to(ROOT)}"
        files.append(File.generated(config, name, content=picture.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links at the pages of the site; what the site has not is named without a link."""
    uri = page.file.src_uri
    here = posixpath.dirname(uri.removeprefix("project/") if uri.startswith("project/") else f"docs/{uri}")

    def link(found: re.Match[str]) -> str:
        text, target, mark = found.group(1), found.group(2), found.group(3) or ""
        if "://" in target or target.startswith("mailto:"):
            return found.group(0)
        inside = placed(posixpath.normpath(posixpath.join(here, target)))
        if inside is None:
            return text
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{mark})"

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^()\s#]+)(#[^()\s]*)?\)", link, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Makes cells of headings that are empty plain ones: nobody is told of a heading that says nothing."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Ends the build where a page would fetch something: the site works without a network. And says in which
    language a page is."""
    fetched = re.findall(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="(https?:[^"]*)""", output)
    if fetched := [url for url in fetched if not url.startswith(config.site_url or " ")]:
        raise PluginError(f"{page.file.src_uri} would fetch {fetched[0]}")
    chinese = page.file.src_uri.startswith("zh/") or page.file.src_uri.endswith(".zh-CN.md")
    return output.replace('<html lang="en"', '<html lang="zh-CN"', 1) if chinese else output


def on_post_build(config: Any) -> None:
    """Ends the build where a page shows a picture that the site has not."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        for source in re.findall(r"""<img\b[^>]*?\bsrc="([^":]+)\"""", page.read_text(encoding="utf-8")):
            if not (page.parent / source).exists():
                raise PluginError(f"{page.relative_to(site)} shows {source}, which is not in the site")
