"""YAML text as plain values that remember where they came from: a line of a file, or an override.

Knows nothing of what a document means; the models that check the values ask here for the place of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import PacelineError, RecipeError, nearest

KeyPath = tuple[str | int, ...]
_KEY = r"""'[^']*'|"[^"]*"|[^.='"]+"""
_ASSIGNMENT = re.compile(rf"\s*((?:{_KEY})(?:\.(?:{_KEY}))*)\s*=(.*)", re.S)
_DEEPEST = 50


class _Loader(yaml.SafeLoader):
    """Safe YAML in which `1e-3` is a number, as in YAML 1.2 and in every other language."""


# Resolvers live on the class in PyYAML; copy them so that other users of SafeLoader are not changed.
_Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass(frozen=True)
class Genre:
    """What a document is, for messages.

    Attributes:
        word: what users call it.
        error: what is raised about it.
        example: what its mapping is of.
        absent: what is said before the path of a file that is not there.
    """

    word: str
    error: type[PacelineError]
    example: str
    absent: str = "there is no file "


RECIPE = Genre("recipe", RecipeError, "sections such as 'train:'", "there is no recipe ")


@dataclass
class Source:
    """The values of one YAML document, and where each was written.

    Attributes:
        name: what the document is called in messages: its path.
        values: plain dictionaries, lists and scalars.
        places: `gpt.yaml, line 3` or `--set a.b=c` for every key path.
        genre: what the document is.
    """

    name: str
    values: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)
    genre: Genre = RECIPE

    def place(self, path: KeyPath) -> str:
        """Return where the value at `path`, or else the nearest section around it, was written."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return self.name

    def override(self, assignments: Iterable[str]) -> None:
        """Apply `a.b=value` assignments in order; the value is YAML, and sections that are missing are made.

        A key with a dot in it is quoted: `plan.pins.'*.weight'=fsdp=S0`.

        Raises:
            PacelineError: of the genre: an assignment has no `=`, its value is not YAML, or its path leads through a
                plain value.
        """
        for assignment in assignments:
            match = _ASSIGNMENT.fullmatch(assignment)
            path = tuple(key.strip().strip("'\"") for key in re.findall(_KEY, match[1])) if match else ()
            if match is None or not all(path):
                raise self.genre.error(
                    f"cannot read '--set {assignment}'; write a key and a value, as in '--set train.batch=16'."
                )
            try:
                value = yaml.load(match[2], _Loader)
            except yaml.YAMLError as error:
                raise self.genre.error(f"--set {assignment}: the value is not YAML: {_problem(error)}.") from error
            section = self._section(path[:-1], assignment)
            section.pop(path[-1], None)  # the last one comes last: where several pins match, it counts
            section[path[-1]] = value
            self.places = {key: place for key, place in self.places.items() if key[: len(path)] != path}
            self.places[path] = f"--set {assignment}"

    def _section(self, path: tuple[str, ...], assignment: str) -> dict[str, Any]:
        section = self.values
        for depth, key in enumerate(path):
            inner = section.get(key)
            if inner is None:
                inner = section[key] = {}
            if not isinstance(inner, dict):
                dotted = ".".join(path[: depth + 1])
                raise self.genre.error(
                    f"--set {assignment}: '{dotted}' is the value {inner!r}, not a section with keys."
                )
            section = inner
        return section


def read_source(path: Path, genre: Genre = RECIPE) -> Source:
    """Read a YAML file whose document is a mapping.

    Raises:
        PacelineError: of the genre: the file is missing or unreadable, is not YAML, repeats a key, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        beside = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        there = f"; {genre.word}s there: {', '.join(beside)}" if beside else ""
        raise genre.error(f"{genre.absent}{path}{there}.{nearest(path.name, beside)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise genre.error(f"{genre.word} {path} cannot be read: {error}.") from error
    return parse_source(text, str(path), genre)


def parse_source(text: str, name: str, genre: Genre = RECIPE) -> Source:
    """Parse YAML text whose document is a mapping; `name` is what messages call it.

    Raises:
        PacelineError: as `read_source`, without the reading.
    """
    loader = _Loader(text)
    places: dict[KeyPath, str] = {}
    try:
        root = loader.get_single_node()
        if root is not None:
            _record(root, (), name, places, genre)
        values = {} if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}, line {mark.line + 1}" if mark else name
        raise genre.error(f"{where}: not valid YAML: {_problem(error)}.") from error
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise genre.error(f"{name} holds a {type(values).__name__}; a {genre.word} is a mapping of {genre.example}.")
    return Source(name, values, places, genre)


def _record(node: yaml.Node, path: KeyPath, name: str, places: dict[KeyPath, str], genre: Genre) -> None:
    """Note the line of every key below `node`, and refuse one that is written twice (PyYAML keeps the last)."""
    if len(path) > _DEEPEST:
        raise genre.error(f"{places[path]}: more than {_DEEPEST} levels deep; does an anchor contain itself?")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            line = f"{name}, line {key.start_mark.line + 1}"
            if here in places:
                dotted = ".".join(map(str, here))
                raise genre.error(f"{line}: the key '{dotted}' is given twice, first in {places[here]}; keep one.")
            places[here] = line
            _record(value, here, name, places, genre)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[(*path, index)] = f"{name}, line {item.start_mark.line + 1}"
            _record(item, (*path, index), name, places, genre)


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error)
