"""What pydantic refuses, as one readable line each: where it was written, what is allowed, the nearest known word.

Knows pydantic's errors and a `Source`; knows nothing of any particular model.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from paceline.documents.source import KeyPath, Source
from paceline.errors import nearest


def complaint(message: str, key: str | tuple[str, ...] | None = None) -> PydanticCustomError:
    """Return an error for a validator to raise, about `key` of its section (`a.b` for a key further inside).

    A key that may have a dot in it is given as a tuple of keys.
    """
    return PydanticCustomError("complaint", "{message}", {"message": message, "key": key})


def complaints(error: ValidationError, model: type[BaseModel], source: Source) -> list[str]:
    """Return a line for everything `error` holds against the values of `source`, checked as `model`."""
    return [_line(details, model, source) for details in error.errors(include_url=False)]


def _line(details: ErrorDetails, model: type[BaseModel], source: Source) -> str:
    context = details.get("ctx", {})
    path, known = _follow(model, details["loc"])
    if details["type"] == "union_tag_invalid":
        key = str(context["discriminator"]).strip("'")
        path, allowed = (*path, key), re.findall(r"'([^']*)'", str(context["expected_tags"]))
        text = (
            f"'{_dotted(path)}' is '{context['tag']}'; known: {', '.join(allowed)}.{nearest(context['tag'], allowed)}"
        )
    elif details["type"] == "union_tag_not_found":
        path = (*path, str(context["discriminator"]).strip("'"))
        text = f"the key '{_dotted(path)}' is missing; known: {', '.join(_tags(model, details['loc']))}."
    elif details["type"] == "complaint":
        about = context["key"] or ()
        path = (*path, *(about.split(".") if isinstance(about, str) else about))
        text = context["message"]
    elif details["type"] == "extra_forbidden":
        section = f"keys of '{_dotted(path[:-1])}'" if path[:-1] else "sections"
        hint = nearest(str(path[-1]), known)
        text = f"unknown key '{_dotted(path)}'.{hint} Known {section}: {', '.join(known) or 'none'}."
    elif details["type"] == "missing":
        text = f"the key '{_dotted(path)}' is missing."
    else:
        text = _refused_value(details, path)
    return f"{source.place(path)}: {text}"


def _refused_value(details: ErrorDetails, path: KeyPath) -> str:
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "value_error":
        return f"'{_dotted(path)}': {message}"
    message = message.removeprefix("Input should be ").replace("a valid integer", "a whole number")
    message = message.partition(", unable to parse")[0]
    given = details["input"]
    allowed = re.findall(r"'([^']*)'", message)
    hint = nearest(given, allowed) if isinstance(given, str) else ""
    return f"'{_dotted(path)}' must be {message}, not {given!r}.{hint}"


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _follow(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[KeyPath, list[str]]:
    """Return `location` without the tags of unions, which no user wrote, and the known keys of its last section."""
    path: list[int | str] = []
    models: list[type[BaseModel]] = [model]
    known: list[str] = []
    for part in location:
        tagged = [m for m in models if part in _literals(m)]
        if tagged and not any(part in _fields(m) for m in models):
            models = tagged
            continue
        path.append(part)
        if isinstance(part, int):
            continue
        known = list(dict.fromkeys(key for m in models for key in _fields(m)))
        models = [inner for m in models for inner in _models_in(_fields(m).get(part))]
    return tuple(path), known


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """Annotations of a model by the name the user writes."""
    return {info.alias or name: info.annotation for name, info in model.model_fields.items()}


def _literals(model: type[BaseModel]) -> set[Any]:
    return {value for info in model.model_fields.values() for value in _values_of(info.annotation)}


def _values_of(annotation: Any) -> Iterable[Any]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _tags(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the words that tell the members of the union at `location` apart."""
    models: list[type[BaseModel]] = [model]
    for part in location:
        models = [inner for m in models for inner in _models_in(_fields(m).get(str(part)))]
    return sorted(str(value) for m in models for value in _literals(m) if isinstance(value, str))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated, list, tuple):
        return [inner for argument in get_args(annotation) for inner in _models_in(argument)]
    return []
