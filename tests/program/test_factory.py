"""Factories: the user's code found from one line of text, and errors that show the user's own line."""

import sys

import pytest

from paceline.errors import RecipeError
from paceline.program.factory import load_factory


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "models.py").write_text(
        "from neighbour_of_models import width\n\ndef build(n=1):\n    return n * width\n\n"
        "class Net:\n    @classmethod\n    def tiny(cls):\n        return 'tiny'\n\nSIZE = 3\n"
    )
    (tmp_path / "neighbour_of_models.py").write_text("width = 7\n")
    package = tmp_path / "package_of_user"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text("def build():\n    return 'packaged'\n")
    (tmp_path / "raises.py").write_text("x = 1\n\ny = x / 0\n")
    (tmp_path / "needs.py").write_text("import no_such_library\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit('usage: me')\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_files_and_modules(folder):
    assert load_factory("models.py:build", folder)(n=2) == 14
    assert load_factory(f"{folder}/models.py:Net.tiny", folder / "elsewhere")() == "tiny"
    assert load_factory("package_of_user.nets:build", folder)() == "packaged"
    assert load_factory("math:sqrt", folder)(4) == 2


def test_a_file_is_imported_once(folder):
    assert load_factory("models.py:Net", folder) is load_factory("./models.py:Net", folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models.py", "cannot read the factory 'models.py'; write 'package.module:callable'"),
        (":build", "cannot read"),
        ("modls.py:build", r"no file .*modls\.py\. Did you mean 'models\.py'\? There is: exits\.py, models\.py"),
        ("none/models.py:build", r"no file .*none/models\.py\.$"),
        ("models.py:biuld", r"models\.py has no 'biuld'\. Did you mean 'build'\? There is: Net, build\."),
        ("models.py:Net.tin", "Did you mean 'tiny'"),
        ("models.py:SIZE", "'SIZE' is a int; it must be callable"),
        (
            "modls:build",
            r"no module 'modls', neither installed nor in .*Did you mean 'models'.*write 'path/to/file\.py",
        ),
        ("package_of_user.netz:build", r"no module 'package_of_user\.netz'.* Did you mean 'package_of_user\.nets'"),
        ("raises.py:build", r"could not be imported: ZeroDivisionError: division by zero\n  .*raises\.py:3: y = x / 0"),
        ("raises:build", r"ZeroDivisionError: division by zero\n  .*raises\.py:3: y = x / 0"),
        ("needs.py:build", r"No module named 'no_such_library'\n  .*needs\.py:1: import no_such_library"),
        ("needs:build", r"No module named 'no_such_library'\n  .*needs\.py:1: import no_such_library"),
        ("syntax.py:build", r"SyntaxError: .*\n  .*syntax\.py:1: def f\(:"),
        ("exits.py:build", r"SystemExit: usage: me\n  .*exits\.py:2"),
    ],
)
def test_what_cannot_be_used_is_named(folder, text, message):
    with pytest.raises(RecipeError, match=message):
        load_factory(text, folder)


def test_the_users_line_is_shown_not_that_of_the_library_it_called(folder):
    (folder / "calls.py").write_text("import json\n\nsettings = json.loads('{')\n")
    with pytest.raises(RecipeError, match=r"JSONDecodeError: .*\n  .*calls\.py:3: settings = json"):
        load_factory("calls.py:build", folder)


def test_a_failed_import_can_be_repaired(folder):
    with pytest.raises(RecipeError):
        load_factory("raises.py:build", folder)
    (folder / "raises.py").write_text("def build():\n    return 'repaired'\n")
    assert load_factory("raises.py:build", folder)() == "repaired"
