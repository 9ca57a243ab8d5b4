# SPDX-License-Identifier: Apache-2.0
"""Where a node's settings come from."""

from pathlib import Path

import pytest

from shoal.node.cli import load_config
from shoal.protocol.errors import ConfigError


def write(folder: Path, text: str) -> None:
    (folder / "node.toml").write_text(text, encoding="utf-8")


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    write(tmp_path, 'host = "10.0.0.1"\nport = 7700\nthreads = 3\n')
    environment = {"SHOAL_NODE_PORT": "7701", "SHOAL_NODE_THREADS": "4", "HOST": "x"}
    config = load_config({"folder": tmp_path, "threads": 5}, environment, tmp_path)
    assert (config.host, config.port, config.threads) == ("10.0.0.1", 7701, 5)
    assert config.device == "auto"


def test_the_environment_may_name_the_folder_that_holds_the_file(tmp_path: Path) -> None:
    write(tmp_path, "grace_s = 2.5\n")
    config = load_config({}, {"SHOAL_NODE_FOLDER": str(tmp_path)}, None)
    assert (config.folder, config.grace_s) == (tmp_path, 2.5)


def test_booleans_can_be_written_in_the_environment(tmp_path: Path) -> None:
    assert not load_config({}, {"SHOAL_NODE_DISCOVERY": "false"}, tmp_path).discovery


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosst = 'x'\n", "did you mean 'host'"),
        ("port = 70000\n", "port = 70000"),
        ("device = 'tpu'\n", "use auto, cpu, cuda, cuda:1 or mps"),
        ("device = \n", "node.toml"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError, match=says):
        load_config({}, {}, tmp_path)


def test_a_misspelt_variable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean SHOAL_NODE_THREADS"):
        load_config({}, {"SHOAL_NODE_THREADDS": "2"}, tmp_path)
