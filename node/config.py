# SPDX-License-Identifier: Apache-2.0
"""What a node's owner decides. Flags of `shoal join` over environment over node.toml over these."""

import re
from pathlib import Path
from typing import Annotated

from platformdirs import user_data_path
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3})?")


def default_folder() -> Path:
    return user_data_path("shoal") / "node"


def _known_device(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"device = {device!r} is unknown; use auto, cpu, cuda, cuda:1 or mps")
    return device


class NodeConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path = Field(default_factory=default_folder)
    """Identity, cached token shards, state files. One running daemon per folder."""
    host: str = "127.0.0.1"
    """Address to listen on. Loopback unless told otherwise."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one."""
    advertise: str = ""
    """Host at which others reach this node; empty means `host`."""
    device: Annotated[str, AfterValidator(_known_device)] = "auto"
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads for computation. Part of the kernel class: nodes that must agree bit for bit
    use the same."""
    max_memory_gb: Annotated[float, Field(ge=0)] = 0
    """Use at most so much memory for a stage; 0 means 60 % of what is free."""
    cache_gb: Annotated[float, Field(gt=0)] = 10.0
    """Disk space for token shards; those used longest ago go first, those in use stay."""
    discovery: bool = True
    """Take part in the DHT, to be found and to find a coordinator that moved."""
    grace_s: Annotated[float, Field(gt=0)] = 30.0
    """How long a leaving node may take to finish its work."""
    donate_mb_per_s: Annotated[float, Field(ge=0)] = 0
    """Give the stage's state to joiners at most so fast while nobody waits for it, in MB/s; 0 means
    as fast as it goes."""
