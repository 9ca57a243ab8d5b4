# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, and which calls appear nowhere: read from the syntax trees.

Imports count wherever they stand: inside functions, under TYPE_CHECKING, relative, or through
`importlib.import_module("…")`.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shoal"

MAY_IMPORT = {
    "protocol": {"shoal.protocol", "shoal.version"},
    "compression": {"shoal.compression", "shoal.protocol", "shoal.version"},
    "node": {"shoal.node", "shoal.compression", "shoal.protocol", "shoal.version"},
    "coordinator": {"shoal.coordinator", "shoal.compression", "shoal.protocol", "shoal.version"},
}

FORBIDDEN_IMPORTS = {
    "libp2p": "it can't share a process with hivemind",
    "pickle": "loading one runs code",
    "cPickle": "loading one runs code",
    "cloudpickle": "loading one runs code",
    "dill": "loading one runs code",
    "joblib": "it loads pickles",
    "shelve": "it loads pickles",
    "marshal": "it crashes on hostile input",
    "os.system": "it takes a shell string",
    "os.popen": "it takes a shell string",
    "torch.load": "it loads pickles",
}
FORBIDDEN_CALLS = {
    "eval", "exec", "torch.load", "os.system", "os.popen", "subprocess.getoutput",
    "subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "yaml.load",
    "yaml.unsafe_load",
}  # fmt: skip
FORBIDDEN_KEYWORDS = {"shell", "allow_pickle"}


def python_files(folder: Path) -> list[Path]:
    """Every .py file below, also through symbolic links."""
    found = []
    for here, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        found += [Path(here, name) for name in sorted(names) if name.endswith(".py")]
    return found


def dotted(node: ast.expr) -> str:
    """ "os.path.join" of a chain of names; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything imported; `from a import b` gives "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            named = dotted(node.func)
            first = node.args[0]
            if (
                named.rpartition(".")[2] in {"import_module", "__import__"}
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                yield node.lineno, first.value


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer_faults(source: str, module: str) -> list[str]:
    """What `module` ("shoal.protocol.wire") imports and must not."""
    layer = module.split(".")[1]
    faults = []
    for line, name in imports(source, module):
        if (
            layer in MAY_IMPORT
            and within(name, "shoal")
            and not any(within(name, allowed) for allowed in MAY_IMPORT[layer])
        ):
            faults.append(f"{module}:{line} imports {name}")
        for heavy in ("torch", "hivemind"):  # hivemind imports torch
            if (
                layer == "protocol"
                and within(name, heavy)
                and not module.rpartition(".")[2].startswith("discovery_dht")
            ):
                faults.append(f"{module}:{line} imports {name}; protocol stays light")
    return faults


def danger_faults(source: str, where: str) -> list[str]:
    """Imports and calls that nothing of ours may contain."""
    faults = [
        f"{where}:{line} imports {name}: {why}"
        for line, name in imports(source, where)
        for forbidden, why in FORBIDDEN_IMPORTS.items()
        if within(name, forbidden)
    ]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if (called := dotted(node.func)) in FORBIDDEN_CALLS:
            faults.append(f"{where}:{node.lineno} calls {called}")
        for keyword in node.keywords:
            harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in FORBIDDEN_KEYWORDS and not harmless:
                faults.append(f"{where}:{node.lineno} passes {keyword.arg}=")
    return faults


def test_layers_import_only_what_lies_below_them() -> None:
    faults = []
    for path in python_files(PACKAGE):
        module = ".".join(["shoal", *path.relative_to(PACKAGE).with_suffix("").parts])
        faults += layer_faults(path.read_text(encoding="utf-8"), module)
    assert not faults, "\n".join(faults)


def test_nothing_loads_pickles_or_runs_strings() -> None:
    faults = []
    files = [path for name in ("src", "scripts", "tests", "benchmarks", "deploy")
             for path in python_files(ROOT / name)]  # fmt: skip
    for path in files:
        faults += danger_faults(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    assert not faults, "\n".join(faults)


def test_all_four_layers_are_walked() -> None:
    walked = {path.relative_to(PACKAGE).parts[0] for path in python_files(PACKAGE)}
    assert set(MAY_IMPORT) <= walked


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shoal.protocol.a", "import shoal.node.stage"),
        ("shoal.protocol.a", "from shoal import compression"),
        ("shoal.protocol.a", "def f():\n    import torch.nn"),
        ("shoal.protocol.a", "import hivemind"),
        ("shoal.protocol.a", "from ..node import stage"),
        ("shoal.compression.a", "from shoal.node.stage import Stage"),
        ("shoal.node.a", "if TYPE_CHECKING:\n    from shoal.coordinator.state import State"),
        ("shoal.node.a", "import importlib\nimportlib.import_module('shoal.coordinator.state')"),
        ("shoal.node.sub.a", "from shoal import cli"),
        ("shoal.coordinator.a", "from shoal.node import stage"),
    ],
)
def test_a_layer_fault_is_found(module: str, source: str) -> None:
    assert layer_faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shoal.protocol.discovery_dht", "import hivemind, torch"),
        ("shoal.protocol.a", "from shoal.protocol.ids import Stage\nimport torchless"),
        ("shoal.node.a", "import torch\nfrom shoal.compression.codec import Codec"),
        ("shoal.cli", "import shoal.node.daemon\nimport shoal.coordinator.daemon"),
    ],
)
def test_what_a_layer_may_import_passes(module: str, source: str) -> None:
    assert not layer_faults(source, module)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "def f():\n    from libp2p.crypto import keys",
        "torch.load(path)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(line, shell=True)",
        "subprocess.run(line, shell=flag)",
        "os.system(line)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
    ],
)
def test_a_dangerous_line_is_found(source: str) -> None:
    assert danger_faults(source, "x.py")


def test_harmless_lookalikes_pass() -> None:
    source = "model.eval()\nsubprocess.run(words, shell=False)\nnumpy.load(p, allow_pickle=False)"
    assert not danger_faults(source, "x.py")
