"""Pages of which a command writes one part each: between two comments, everything else stays as people wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paceline.errors import RecipeError


def write_section(page: Path, name: str, lines: Iterable[str]) -> None:
    """Write a part of a page anew, or add it at the end where the page, or the part, is not there yet.

    Raises:
        RecipeError: the page cannot be read or written, or has only one of the comments around the part.
    """
    begin, end = f"<!-- {name}: written by a command -->", f"<!-- {name}: end -->"
    try:
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        if (begin in text) != (end in text):
            raise RecipeError(f"{page} has one of the comments '{begin}' and '{end}' without the other; add it.")
        part = "\n".join((begin, "", *lines, "", end))
        if begin in text:
            before, _, rest = text.partition(begin)
            text = before + part + rest.partition(end)[2]
        else:
            text = f"{text.rstrip()}\n\n{part}\n".lstrip()
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"the page {page} cannot be written: {error}.") from error
