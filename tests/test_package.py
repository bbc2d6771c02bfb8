"""The package as it is installed: pure Python, complete, and light until used."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[1]


def test_every_module_imports() -> None:
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        importlib.import_module(module.name)


@pytest.mark.parametrize("name", paceline.__all__)
def test_public_names_exist(name: str) -> None:
    assert getattr(paceline, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'shard'"):
        _ = paceline.shard  # type: ignore[attr-defined]


def test_importing_paceline_costs_no_pytorch() -> None:
    code = "import sys, paceline; paceline.Plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_wheel_is_pure_python_and_complete(tmp_path: Path) -> None:
    sources = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py")]
    for name in [*map(Path, ("pyproject.toml", "README.md", "LICENSE")), *("src" / path for path in sources)]:
        target = tmp_path / "tree" / name  # a copy: building leaves files behind
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tree/src/paceline/py.typed").touch()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", tmp_path, tmp_path / "tree"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"paceline-{paceline.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {str(path) for path in sources} <= names
    assert "paceline/py.typed" in names
    assert not [name for name in names if name.endswith((".so", ".pyd", ".dylib"))]


def test_no_module_runs_above_its_floor() -> None:
    """The layers of `pyproject.toml`; here too, so that a plain `pytest` tells."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
