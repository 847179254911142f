"""The built wheel, installed away from the checkout, imports and answers on the command line."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def python(*args: str | Path, cwd: Path, site: Path | None = None) -> str:
    env = os.environ | {"PYTHONPATH": str(site)} if site else None
    done = subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    site = wheel.parent / "site"
    python("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, wheel, cwd=wheel.parent)
    return site


def test_wheel_holds_the_package_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"unskip", f"unskip-{VERSION}.dist-info"}
    assert "unskip/py.typed" in names
    assert f"unskip-{VERSION}.dist-info/licenses/LICENSE" in names


def test_installed_wheel_imports(site: Path, tmp_path: Path) -> None:
    out = python("-c", "import unskip; print(unskip.__version__, unskip.__file__)", cwd=tmp_path, site=site)
    version, file = out.split(maxsplit=1)
    assert version == VERSION
    assert Path(file.strip()).is_relative_to(site)


def test_installed_wheel_answers_help(site: Path, tmp_path: Path) -> None:
    assert "audit" in python("-m", "unskip", "--help", cwd=tmp_path, site=site)
