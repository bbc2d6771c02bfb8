"""Figures of this machine that are measured once: a file of JSON beside cached programs, in sections.

What cannot be read counts as nothing, and is replaced by what is measured next; what cannot be written is a line in the
log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.runtime.program_cache import read_ours, write_atomically

_log = logging.getLogger(__name__)


class Kept:
    """A file of sections.

    Args:
        directory: where it is; None: nothing is kept or found.
        name: of the file.
    """

    def __init__(self, directory: Path | None, name: str) -> None:
        self._path = None if directory is None else directory / name

    def section(self, key: str) -> dict[str, Any]:
        """Return a section; empty where there is none."""
        found = self._content().get(key, {})
        return found if isinstance(found, dict) else {}

    def store(self, key: str, values: Mapping[str, Any]) -> None:
        """Put a section in the place of what it was."""
        if self._path is None:
            return
        content = {**self._content(), key: dict(values)}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content, indent=0).encode())
        except OSError as error:
            _log.warning("the figures of this machine are not kept: %s", error)

    def _content(self) -> dict[str, Any]:
        try:
            content = None if self._path is None else json.loads(read_ours(self._path) or b"{}")
        except (OSError, ValueError, TypeError):
            return {}
        return content if isinstance(content, dict) else {}
