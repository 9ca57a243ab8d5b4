# SPDX-License-Identifier: Apache-2.0
"""Every source file says its licence at its top; every Python file says what it is for."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPDX = "SPDX-License-Identifier: Apache-2.0"
SUFFIXES = {
    ".c", ".cfg", ".css", ".dockerignore", ".h", ".html", ".js", ".mjs", ".plist", ".proto",
    ".py", ".pyi", ".service", ".sh", ".svg", ".toml", ".yaml", ".yml",
}  # fmt: skip
FOLDERS = {
    ".ci", ".github", "benchmarks", "compression", "coordinator", "deploy", "docs", "node",
    "protocol", "scripts", "src", "tests",
}  # fmt: skip
THIRD_PARTY = {"vendor"}


def is_source(path: Path) -> bool:
    if "_pb2" in path.name:  # generated: protoc keeps no header
        return False
    return (
        path.suffix in SUFFIXES
        or path.name in {"constraints.txt", "MANIFEST.in", ".dockerignore"}
        or path.name.startswith("Dockerfile")
        or (not path.suffix and path.read_bytes()[:2] == b"#!")
    )


def sources() -> Iterator[Path]:
    yield from (path for path in sorted(ROOT.iterdir()) if path.is_file() and is_source(path))
    for folder in sorted(FOLDERS):
        for here, inner, names in os.walk(ROOT / folder):  # symbolic links are not followed
            inner[:] = sorted(
                name for name in inner
                if name not in {"__pycache__", "node_modules", *THIRD_PARTY}
                and not name.endswith(".egg-info")
            )  # fmt: skip
            for name in sorted(names):
                path = Path(here, name)
                if path.is_file() and is_source(path):
                    yield path


def has_header(text: str) -> bool:
    return any(SPDX in line for line in text.splitlines()[:2])


def test_every_source_file_starts_with_its_licence() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in sources()
        if (text := path.read_text(encoding="utf-8")).strip() and not has_header(text)
    ]
    assert not missing, f"write `{SPDX}` on the first or second line of: {', '.join(missing)}"


def test_every_python_file_has_a_docstring() -> None:
    missing = []
    for path in sources():
        if path.suffix == ".py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if tree.body and ast.get_docstring(tree) is None:
                missing.append(str(path.relative_to(ROOT)))
    assert not missing, f"say in a docstring what each is for: {', '.join(missing)}"


def test_a_header_on_the_third_line_is_too_late() -> None:
    assert has_header(f"#!/usr/bin/env bash\n# {SPDX}\n")
    assert not has_header(f"#!/usr/bin/env bash\n\n# {SPDX}\n")


def test_the_walk_reaches_scripts_without_suffix_and_all_folders() -> None:
    found = {path.relative_to(ROOT) for path in sources()}
    assert {Path("scripts/demo"), Path(".ci/run"), Path("deploy/Dockerfile.node")} <= found
    assert Path("protocol/proto/peer.proto") in found
    assert not any("_pb2" in path.name for path in found)
