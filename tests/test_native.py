"""Native parts that cannot be built say why."""

from __future__ import annotations

import threading

import pytest

from paceline import native
from paceline.native import BuildError, Extension


@pytest.fixture
def extension(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tmp_path.joinpath("broken.cpp").write_text("int f() { return no_such_thing; }\n")
    return Extension("paceline_broken", tmp_path, ("*.cpp",), "something broken", "a moment")


def test_without_a_compiler(extension, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        extension.load()


def test_what_the_compiler_says_is_shown_and_kept(extension):
    with pytest.raises(BuildError, match=r"compiler failed:[\s\S]*no_such_thing"):
        extension.load()
    assert "no_such_thing" in (extension.directory / "build.log").read_text()


def test_a_directory_that_cannot_be_written(extension, tmp_path):
    tmp_path.joinpath("cache").write_text("a file")
    with pytest.raises(BuildError, match="set XDG_CACHE_HOME elsewhere"):
        extension.load()


def test_one_thread_loads_it_and_others_wait(extension, monkeypatch):
    """A module that is being made is found by whoever asks for it meanwhile, without what it will have."""
    inside, together = [], []
    other = threading.Thread(target=extension.load)

    def loaded(asked):
        together.append(len(inside))
        inside.append(asked)
        if other.ident is None:
            other.start()
            other.join(0.05)
        inside.pop()

    monkeypatch.setattr(native, "_loaded", loaded)
    extension.load()
    other.join()
    assert together == [0, 0]
