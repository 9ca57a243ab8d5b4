# SPDX-License-Identifier: Apache-2.0
"""Images, compose file, systemd units and the install script: as far as one can say without
running a container engine."""

import configparser
import http.server
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from shoal.protocol.spec import load_run_spec

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def load_healthcheck() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", DEPLOY / "healthcheck.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


# ---- compose -----------------------------------------------------------------------------


def test_compose_file_follows_the_specification(compose: dict[str, Any]) -> None:
    schema = json.loads((ROOT / "tests" / "golden" / "compose-spec.json").read_text())
    assert re.fullmatch(r"[a-z0-9_-]+", compose["name"])  # newer than this copy of the schema
    rest = {key: value for key, value in compose.items() if key != "name"}
    jsonschema.Draft201909Validator(schema).validate(rest)


def test_compose_publishes_on_loopback_only(compose: dict[str, Any]) -> None:
    published = [
        port for service in compose["services"].values() for port in service.get("ports", [])
    ]
    assert published
    assert all(str(port).startswith("127.0.0.1:") for port in published)


def test_compose_names_only_what_exists(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_file(), volume
        for network in service["networks"]:
            assert network in compose["networks"]


def test_compose_hands_the_join_link_over_and_keeps_every_state_apart(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    assert "link:/link" in services["coordinator"]["volumes"]
    nodes = {name: service for name, service in services.items() if name.startswith("node-")}
    assert len(nodes) == 2
    for name, node in nodes.items():
        assert node["volumes"] == [f"{name}:/var/lib/shoal", "link:/link:ro"]
        assert "--link-file=/link/join" in node["command"]
    assert "--link-file=/link/join" in services["coordinator"]["command"]


def test_compose_services_listen_where_their_network_puts_them(compose: dict[str, Any]) -> None:
    addresses = set()
    for service in compose["services"].values():
        address = service["networks"]["swarm"]["ipv4_address"]
        assert f"--host={address}" in service["command"]
        addresses.add(address)
    assert len(addresses) == len(compose["services"])


def test_compose_services_are_confined_and_get_a_minute_to_stop(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["stop_signal"] == "SIGINT"
        assert service["stop_grace_period"] == "60s"


def test_compose_run_spec_is_valid_and_fits_its_two_nodes() -> None:
    spec = load_run_spec(DEPLOY / "run.toml")
    assert spec.pipeline.stages * spec.pipeline.replicas == 2


# ---- images ------------------------------------------------------------------------------


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) in order, continuation lines joined, comments dropped."""
    text = "\n".join(
        line for line in dockerfile.read_text().splitlines() if not line.startswith("#")
    ).replace("\\\n", " ")
    words = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word[0], word[1]) for word in words]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_image_ends_as_an_ordinary_user_without_build_tools(dockerfile: Path) -> None:
    lines = instructions(dockerfile)
    last_stage = max(at for at, (word, _) in enumerate(lines) if word == "FROM")
    final = lines[last_stage:]
    assert final[0] == ("FROM", "python:3.11-slim")
    assert ("USER", "shoal") in final
    assert not any(
        word == "RUN" and re.search(r"pip|apt|install\.sh", rest) for word, rest in final
    )
    assert [word for word, _ in final].count("HEALTHCHECK") == 1
    assert ("STOPSIGNAL", "SIGINT") in final
    entrypoint = json.loads(dict(final)["ENTRYPOINT"])
    assert entrypoint[0] == "shoal"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_image_copies_what_exists_and_what_the_context_lets_through(dockerfile: Path) -> None:
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    for word, rest in instructions(dockerfile):
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source in let_through


def test_images_install_through_the_one_script() -> None:
    builds = {}
    for dockerfile in DOCKERFILES:
        (ran,) = (
            rest
            for word, rest in instructions(dockerfile)
            if "install.sh " in rest and word == "RUN"
        )
        builds[dockerfile.name] = ran
    assert builds == {
        "Dockerfile.coordinator": "deploy/install.sh cpu /opt/shoal",
        "Dockerfile.node": "deploy/install.sh cpu /opt/shoal",
        "Dockerfile.node-cuda": "deploy/install.sh cuda /opt/shoal",
    }


# ---- health ------------------------------------------------------------------------------


TABLE_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue\n"


@pytest.mark.parametrize(
    ("line", "listens"),
    [
        ("   0: 0100007F:1DB0 00000000:0000 0A 00000000:00000000 00:00000000\n", True),
        ("   0: 0100007F:1DB0 0100007F:A001 01 00000000:00000000 00:00000000\n", False),
        ("   0: 0B00007F:A5C3 00000000:0000 0A 00000000:00000000 00:00000000\n", False),
        ("", False),
    ],
    ids=["listening", "only connected", "only the engine's resolver", "nothing"],
)
def test_node_is_healthy_while_it_listens(tmp_path: Path, line: str, listens: bool) -> None:
    table = tmp_path / "tcp"
    table.write_text(TABLE_HEAD + line)
    assert load_healthcheck().node_listens((table, tmp_path / "absent")) is listens


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_coordinator_is_healthy_while_it_answers(status: int, healthy: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/healthz"
        answers = load_healthcheck().coordinator_answers(url)
        server.shutdown()
        thread.join()
    assert answers is healthy
    assert load_healthcheck().coordinator_answers(url) is False


# ---- systemd -----------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_unit_is_confined_and_stops_politely(unit: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    service = parser["Service"]
    for key, value in {
        "DynamicUser": "yes",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "KillSignal": "SIGINT",
        "KillMode": "mixed",
        "TimeoutStopSec": "60",
        "Restart": "on-failure",
        "CapabilityBoundingSet": "",
    }.items():
        assert service[key] == value, key
    assert service["StateDirectory"].startswith("shoal-")
    assert service["ExecStart"].startswith("/opt/shoal/bin/shoal ")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_unit_passes_systemds_own_check(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/shoal/bin/shoal", "/bin/true"))
    answer = subprocess.run(
        [analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60
    )
    ours = [line for line in answer.stderr.splitlines() if "shoal" in line]
    assert not ours, ours


# ---- install script and command line -----------------------------------------------------


def install(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "SHOAL_TORCH_INDEX"}
    environment |= {"PYTHON": sys.executable, **variables}
    return subprocess.run(
        [str(DEPLOY / "install.sh"), *arguments],
        cwd="/", env=environment, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip


def test_install_takes_the_cpu_build_from_its_index_and_shoal_with_the_pins() -> None:
    answer = install("--dry-run", "cpu", "/opt/shoal")
    assert answer.returncode == 0, answer.stderr
    venv, torch, shoal, _ = answer.stdout.splitlines()
    assert shlex.split(venv)[1:] == ["-m", "venv", "/opt/shoal"]
    assert "--index-url https://download.pytorch.org/whl/cpu torch==" in torch
    assert "-c constraints.txt ." in shoal
    assert "--index-url" not in shoal


def test_install_builds_outside_of_the_checkout(tmp_path: Path) -> None:
    """A stand-in for the interpreter shows what the real one would be started with."""
    folder = tmp_path / "installed"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(
        '#!/bin/sh\n[ -z "$DIST_EXTRA_CONFIG" ] || cat "$DIST_EXTRA_CONFIG"\n', encoding="utf-8"
    )
    python.chmod(0o755)
    shoal = folder / "bin" / "shoal"
    shoal.write_text("#!/bin/sh\n", encoding="utf-8")
    shoal.chmod(0o755)
    answer = install("cpu", str(folder), PYTHON=str(python))
    assert answer.returncode == 0, answer.stderr
    settings = configparser.ConfigParser()
    settings.read_string(answer.stdout)
    for section, name in (("build", "build_base"), ("egg_info", "egg_base")):
        where = Path(settings[section][name])
        assert where.is_absolute()
        assert DEPLOY.parent not in where.parents
        assert not where.parent.exists(), "it is removed at the end"


def test_install_takes_the_cuda_build_from_the_ordinary_index() -> None:
    answer = install("--dry-run", "cuda", "/opt/shoal")
    assert answer.returncode == 0, answer.stderr
    assert "--index-url" not in answer.stdout


@pytest.mark.parametrize("arguments", [(), ("cpu",), ("rocm", "/opt/shoal"), ("cpu", "relative")])
def test_install_refuses_what_it_does_not_understand(arguments: tuple[str, ...]) -> None:
    assert install("--dry-run", *arguments).returncode == 2


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_install_makes_an_environment_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "installed"
    before = sorted(DEPLOY.parent.iterdir())
    answer = install("cpu", str(folder), SHOAL_TORCH_INDEX="")
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.rstrip().splitlines()[-1].startswith("shoal 0.1.0")
    assert sorted(DEPLOY.parent.iterdir()) == before
    shutil.rmtree(folder)


def options_used() -> dict[str, set[str]]:
    """Command -> the options that images, units and the compose file give it."""
    used: dict[str, set[str]] = {"launch": set(), "join": set()}
    for dockerfile in DOCKERFILES:
        last = dict(instructions(dockerfile))
        used[json.loads(last["ENTRYPOINT"])[1]] |= set(json.loads(last["CMD"]))
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=\S+ (.*)", unit.read_text(), re.MULTILINE)
        used[line.split()[0]] |= set(line.split())
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        words = {word.partition("=")[0] for word in service["command"]}
        used["launch" if name == "coordinator" else "join"] |= words
    return {name: {word for word in words if word[:2] == "--"} for name, words in used.items()}


@pytest.mark.parametrize("command", ["launch", "join"])
def test_every_option_used_here_is_one_of_the_command(command: str) -> None:
    pytest.importorskip("shoal.cli")
    answer = subprocess.run(
        [sys.executable, "-c", "from shoal.cli import main; main()", command, "--help"],
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    known = set(re.findall(r"--[a-z][a-z-]*", answer.stdout))
    assert {"--link-file", "--folder"} <= options_used()[command] <= known
