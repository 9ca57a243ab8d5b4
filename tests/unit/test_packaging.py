# SPDX-License-Identifier: Apache-2.0
"""What `pip install` gets: the wheel, the source archive, and the pins."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PARTS = ("node", "protocol", "coordinator", "compression", "src")
FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt",
         "CHANGELOG.md", "CONTRIBUTING.md")  # fmt: skip

_BUILD = """
import os, sys
from setuptools import build_meta
os.chdir(sys.argv[1])
print("built", getattr(build_meta, "build_" + sys.argv[2])(sys.argv[3]))
"""


def build(source: Path, kind: str, out: Path) -> Path:
    """Run the build backend that pyproject.toml names, as pip would, in a process of its own."""
    out.mkdir(exist_ok=True)
    answer = subprocess.run(
        [sys.executable, "-c", _BUILD, str(source), kind, str(out)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    return out / answer.stdout.splitlines()[-1].removeprefix("built ")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """(wheel, sdist), both built in a copy: building writes into the source folder."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        shutil.copytree(
            ROOT / part, source / part, symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )  # fmt: skip
    (source / "tests" / "unit").mkdir(parents=True)
    (source / "tests" / "unit" / "test_stray.py").touch()
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    yield build(source, "wheel", folder / "wheel"), build(source, "sdist", folder / "sdist")
    shutil.rmtree(folder)


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def committed_package_files() -> set[str]:
    """Every file of the package but bytecode, as the wheel should name it."""
    package = ROOT / "src" / "shoal"
    found = set()
    for here, folders, names in os.walk(package, followlinks=True):
        folders[:] = [folder for folder in folders if folder != "__pycache__"]
        found |= {f"shoal/{Path(here, name).relative_to(package).as_posix()}" for name in names}
    return found


def test_the_wheel_carries_every_file_of_the_package(archives: tuple[Path, Path]) -> None:
    missing = committed_package_files() - names_in_wheel(archives[0])
    assert not missing, f"missing from the wheel: {sorted(missing)}"


def test_the_wheel_carries_generated_code_types_licence_and_command(
    archives: tuple[Path, Path],
) -> None:
    names = names_in_wheel(archives[0])
    assert {"shoal/py.typed", "shoal/protocol/proto/peer_pb2.py"} <= names
    assert "shoal/protocol/proto/coordinator_pb2_grpc.pyi" in names
    assert "shoal/coordinator/dashboard/static/index.html" in names
    assert any(name.startswith("shoal/node/") for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)


def test_the_wheel_puts_nothing_but_shoal_into_site_packages(archives: tuple[Path, Path]) -> None:
    tops = {name.split("/")[0] for name in names_in_wheel(archives[0])}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"shoal"}


def test_the_source_archive_builds_the_same_wheel(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    wheel, sdist = archives
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    again = build(unpacked, "wheel", tmp_path / "again")
    assert names_in_wheel(again) == names_in_wheel(wheel)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pinned[canonicalize_name(name)] = version
    return pinned


def requirements(extra: str | None = None) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return [Requirement(line) for line in listed]


@pytest.mark.parametrize("extra", [None, "dev"])
def test_every_dependency_is_pinned_within_its_range(extra: str | None) -> None:
    pinned = pins()
    for requirement in requirements(extra):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt lacks {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} excludes {version}"


def test_pins_are_exact_sorted_and_for_any_build() -> None:
    names = list(pins())
    assert names == sorted(names)
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version}"
        assert not name.startswith(("nvidia-", "triton")), f"{name} belongs to one build of PyTorch"


def test_the_changelog_names_this_version() -> None:
    from shoal.version import __version__

    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
