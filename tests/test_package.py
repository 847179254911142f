"""Contents of the sdist and the wheel; the wheel works outside of the repository."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from unskip._extras import EXTRAS

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def python(*args: str | Path, cwd: Path, site: Path | None = None) -> str:
    env = os.environ | {"PYTHONPATH": str(site)} if site else None
    done = subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def site(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    site = dist / "site"
    python("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, wheel, cwd=dist)
    return site


def test_sdist_has_tests_benchmarks_and_docs(dist: Path) -> None:
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "CITATION.cff LICENSE Makefile benchmarks/rewire.py constraints.txt docs/audit.md mkdocs.yml tests/core.py"
    assert set(wanted.split()) - names == set()


def test_wheel_has_only_the_package(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"unskip", f"unskip-{VERSION}.dist-info"}
    assert "unskip/py.typed" in names
    assert f"unskip-{VERSION}.dist-info/licenses/LICENSE" in names


def test_the_readme_of_the_package_has_no_relative_links(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    text = zipfile.ZipFile(wheel).read(f"unskip-{VERSION}.dist-info/METADATA").decode()
    assert "# unskip" in text
    assert "[arXiv 2404.10947](https://" in text
    assert "band [1e-3, 1e-2)" in text
    assert "(compatibility)" in text
    assert [link for link in re.findall(r"\]\((.*?)\)", text) if not link.startswith("https://")] == []


@pytest.mark.full
def test_wheel_works_with_torch_numpy_and_safetensors_alone(site: Path, tmp_path: Path) -> None:
    hidden = [name for names in EXTRAS.values() for name in names]
    assert python(ROOT / "tests" / "core.py", *hidden, "sklearn", "scipy", cwd=tmp_path, site=site) == ""


def test_version_is_the_same_everywhere(site: Path, tmp_path: Path) -> None:
    out = python("-c", "import unskip; print(unskip.__version__, unskip.__file__)", cwd=tmp_path, site=site)
    version, file = out.split(maxsplit=1)
    assert version == VERSION
    assert Path(file.strip()).is_relative_to(site)
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    (day,) = re.findall(rf"^## \[{re.escape(VERSION)}\] - (\S+)$", changes, re.MULTILINE)
    assert f"\ndate-released: {day}\n" in citation


@pytest.mark.full
def test_installed_wheel_audits_on_the_command_line(site: Path, tmp_path: Path) -> None:
    assert "attention" in python("-m", "unskip", "audit", "timm:test_vit", cwd=tmp_path, site=site)
