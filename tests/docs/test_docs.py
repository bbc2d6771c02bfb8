"""README and docs against the code: keys and defaults, snippets, commands, messages, links."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import tomllib
import types
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
import torch
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import paceline.errors
from paceline.cli.main import app
from paceline.plan import Mesh
from paceline.train.data.config import DataConfig
from paceline.train.recipe import Recipe, load_recipe
from tests.ports import free_port
from tests.ranks import PRELOAD

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)
ROW = re.compile(r"^\| (.*?) \| (.*?) \| .* \|$", re.M)


def named(path: Path) -> str:
    return path.name


def fences(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """The words after the language and the text of each fenced block."""
    for found, words, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if found == language:
            yield words.strip(), text


# Recipes.


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()
    return [model for argument in inner for model in models_in(argument)]


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield f"`{path}`" if path else "top level", model
    for name, field in model.model_fields.items():
        key = f"{path}.{field.alias or name}".lstrip(".")
        if key == "data":
            for source in get_args(get_args(DataConfig)[0]):
                (tag,) = get_args(source.model_fields["source"].annotation)
                yield f"`data`, `source: {tag}`", source
        else:
            for inner in models_in(field.annotation):
                yield from sections(inner, key)


def default(field: FieldInfo) -> str:
    """A default as recipes.md writes it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    match value:
        case None:
            return "none"
        case BaseModel():
            return "section"
        case Mesh():
            return f"`{value}`"
        case tuple() | list():
            return f"`[{', '.join(map(str, value))}]`"
        case str() if value:
            return f"`{value}`"
        case _:
            return f"`{json.dumps(value)}`"


def documented(heading: str) -> dict[str, str]:
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return {key.strip("`"): value for key, value in ROW.findall(section) if key.startswith("`")}


@pytest.mark.parametrize(("heading", "model"), [pytest.param(*pair, id=pair[0]) for pair in sections(Recipe)])
def test_every_key_of_a_recipe_is_documented_with_its_default(heading: str, model: type[BaseModel]) -> None:
    expected = {field.alias or name: default(field) for name, field in model.model_fields.items()}
    assert documented(heading) == expected


def test_no_section_is_documented_that_does_not_exist() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/recipes.md").read_text(encoding="utf-8"), re.M)
    assert headings == [heading for heading in headings if heading in dict(sections(Recipe))]


# Snippets.


WITH_SNIPPETS = [page for page in PAGES if any("run" in words.split() for words, _ in fences(page, "python"))]


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=named)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those marked `python run`, in order, each going on from the ones before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_CACHE", "off")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    scope: dict[str, Any] = {"__name__": "snippets"}
    said = io.StringIO()
    try:
        for number, (words, text) in enumerate(fences(page, "python")):
            if "run" in words.split():
                with contextlib.redirect_stdout(said):
                    exec(compile(text, tmp_path / f"{page.stem}-{number}.py", "exec"), scope)
    finally:
        torch.set_num_threads(threads)
    if page.name == "own-module.md":
        shown = page.read_text(encoding="utf-8").partition("    the module could not be captured")[2].splitlines()[0]
        assert f"the module could not be captured{shown}" in said.getvalue()


def be_rank(file: Path, environment: dict[str, str]) -> None:
    """Run a file as a rank that torchrun started; what it says is left beside it, and its stacks if it hangs."""
    os.environ.update(environment)
    said = os.open(file.with_suffix(f".{environment['RANK']}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.dump_traceback_later(120, file=2, exit=True)
    with os.fdopen(1, "w", buffering=1, closefd=False) as out, contextlib.redirect_stdout(out):
        runpy.run_path(str(file), run_name="__main__")


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/shared-memory.md"], ids=named)
def test_the_file_of_a_page_trains_on_two_ranks(page: Path, tmp_path: Path) -> None:
    """They find what torchrun gives to ranks, which `tests/runtime/job/test_rendezvous.py` starts itself."""
    ((words, text),) = [found for found in fences(page, "python") if found[0].startswith("file=")]
    file = tmp_path / words.removeprefix("file=")
    file.write_text(text)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PACELINE_CACHE": "off", "GLOO_SOCKET_IFNAME": "lo"}
    given["PACELINE_SHM"] = "portable"  # nothing is to be built in the little time that there is
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks = [
        context.Process(target=be_rank, args=(file, {**given, "RANK": rank, "LOCAL_RANK": rank})) for rank in ("0", "1")
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(600)
        said = [file.with_suffix(f".{rank}").read_text() for rank in ("0", "1")]
        assert [process.exitcode for process in ranks] == [0, 0], said
    finally:
        for process in ranks:
            process.kill()
    losses = [float(line.partition("loss ")[2]) for line in said[0].splitlines() if line.startswith("step")]
    assert len(losses) == 5 and losses[-1] < losses[0]


# Commands.


def commands() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = [block for _, block in fences(page, "sh")]
        blocks += re.findall(r"^    .*$", FENCE.sub("", text), re.M)  # indented blocks
        for line in "\n".join(blocks).splitlines():
            words = line.strip().partition(" ")[0]
            if words in ("paceline", "torchrun", "make"):
                yield page, line.strip()


@pytest.mark.parametrize("command", [pytest.param(line, id=f"{page.name}: {line[:60]}") for page, line in commands()])
def test_commands_are_understood(command: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    if program == "torchrun":
        if "paceline.cli.main" not in arguments:
            return  # a user's own script
        arguments = arguments[arguments.index("paceline.cli.main") + 1 :]
    group: Any = typer.main.get_command(app)
    verb, *arguments = arguments
    if verb.startswith("-"):
        return
    context = group.commands[verb].make_context(verb, arguments)  # parses and checks, and runs nothing
    recipe = context.params.get("recipe")
    if recipe is not None and str(recipe).startswith("recipes/"):
        mesh = context.params["mesh"]
        load_recipe(ROOT / recipe, [*(context.params["sets"] or []), *([f"mesh={mesh}"] if mesh else [])])
    elif context.params.get("mesh"):
        Mesh.parse(context.params["mesh"])


# Messages.


@lru_cache(maxsize=1)
def texts() -> tuple[str, ...]:
    """Every string of the code, Python and C++; what is filled in is left out."""

    def constant(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(constant, node.values))
        return str(node.value) if isinstance(node, ast.Constant) else "\0"

    native = [path for kind in ("*.cpp", "*.hpp") for path in (ROOT / "src").rglob(kind)]
    return (
        *(
            constant(node)
            for path in (ROOT / "src").rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        ),
        *(statement for path in native for statement in native_texts(path.read_text(encoding="utf-8"))),
    )


def native_texts(source: str) -> Iterator[str]:
    """The strings of each statement of C++."""
    strings: list[str] = []
    for token in re.findall(r"//[^\n]*|\"(?:\\.|[^\"\\])*\"|;", source):
        if token.startswith('"'):
            strings.append(token[1:-1])
        elif token == ";":
            yield "\0".join(strings)
            strings = []


def symptoms() -> list[str]:
    rows = ROW.findall((ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"))
    return [symptom for first, _ in rows for symptom in re.findall(r"`([^`]+)`", first)]


@pytest.mark.parametrize("symptom", symptoms())
def test_symptoms_are_words_of_our_own_messages(symptom: str) -> None:
    pattern = re.compile(".*".join(re.escape(part) for part in symptom.split("...")).replace("%s", ".*"), re.S)
    words = max(re.split(r"\.\.\.|%s", symptom), key=len)
    assert any(words in text and pattern.search(text) for text in texts())


def test_every_error_has_its_place_in_troubleshooting() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    base = paceline.errors.PacelineError
    kinds = [kind for kind in vars(paceline.errors).values() if isinstance(kind, type) and issubclass(kind, base)]
    assert [kind.__name__ for kind in kinds if kind is not base and f"`{kind.__name__}`" not in page] == []


# Everything else.


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[\[~>=<]", name)[0] for name in wanted} - {"paceline"}
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| (.*?) \| .+ \|$", page, re.M)
    reasons = {name for cell in explained for name in re.findall(r"`(.+?)`", cell)}
    assert names - reasons == set()


@pytest.mark.parametrize("image", sorted((ROOT / "docs/images").rglob("*.svg")), ids=named)
def test_pictures_stand_alone(image: Path) -> None:
    """Well formed, described for those who cannot see them, and loading nothing."""
    root = ElementTree.parse(image).getroot()
    assert {"title", "desc"} <= {child.tag.rpartition("}")[2] for child in root}
    assert "http" not in image.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
