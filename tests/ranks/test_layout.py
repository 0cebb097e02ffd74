"""Where ranks run, from `--ranks`. The files have mlx.launch's form, the variables are what MLX reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.ranks.layout import RankHost, read_layout

MACS = [
    {"ssh": "mac-1.local", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]},
    {"ssh": "mac-2.local", "ips": ["10.0.0.2"], "rdma": ["rdma_en3", None]},
]


def saved(folder: Path, content: Any) -> str:
    path = folder / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_a_number_means_processes_on_this_host() -> None:
    layout = read_layout("3", "ring")
    assert layout.hosts == (RankHost("127.0.0.1"),) * 3
    assert layout.is_local
    assert len(set(layout.ports)) == 3
    assert layout.connections == [[f"127.0.0.1:{port}"] for port in layout.ports]
    assert [layout.device(rank) for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("form", ["list", "object"])
def test_a_file_names_hosts_as_for_mlx_launch(tmp_path: Path, form: str) -> None:
    content = MACS if form == "list" else {"backend": "ring", "envs": [], "hosts": MACS}
    layout = read_layout(saved(tmp_path, content), "ring")
    assert [host.ip for host in layout.hosts] == ["10.0.0.1", "10.0.0.2"]
    assert [host.ssh for host in layout.hosts] == [None, "mac-2.local"]  # the first is this host
    assert not layout.is_local
    assert [layout.device(rank) for rank in range(2)] == [0, 0]
    assert layout.variables(1, Path("/c")) == {"MLX_RANK": "1", "MLX_HOSTFILE": "/c"}


def test_nccl_and_jaccl_have_variables_of_their_own(tmp_path: Path) -> None:
    layout = read_layout(saved(tmp_path, MACS), "nccl")
    assert layout.variables(1, Path("/c")) == {
        "MLX_RANK": "1",
        "MLX_WORLD_SIZE": "2",
        "NCCL_HOST_IP": "10.0.0.1",
        "NCCL_PORT": str(layout.ports[0]),
    }
    layout = read_layout(saved(tmp_path, MACS), "jaccl")
    assert layout.variables(0, Path("/c")) == {
        "MLX_RANK": "0",
        "MLX_IBV_DEVICES": "/c",
        "MLX_JACCL_COORDINATOR": f"10.0.0.1:{layout.ports[0]}",
    }
    assert layout.connections == [[None, "rdma_en2"], ["rdma_en3", None]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([], "at least two hosts"),
        (MACS[:1], "at least two hosts"),
        ({"servers": MACS}, "at least two hosts"),
        ([MACS[0], {"ips": ["10.0.0.2"]}], "host 1 of .* needs `ssh`"),
        ([MACS[0], {"ssh": "-oProxyCommand=x", "ips": ["10.0.0.2"]}], "host 1 of .* needs `ssh`"),
        ([MACS[0], {"ssh": "mac-2", "ips": "10.0.0.2"}], "host 1 of .* needs `ips`"),
        ([MACS[0], {"ssh": "mac-2", "ips": []}], "host 1 of .* needs `ips`"),
        ([{"ssh": "a", "ips": ["1"], "rdma": [3]}, MACS[1]], "`rdma` of host 0"),
        ([MACS[0], 3], "host 1 of .* needs `ssh`"),
    ],
)
def test_a_wrong_file_is_refused_with_its_host(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_layout(saved(tmp_path, content), "ring")


def test_one_rank_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        read_layout("1", "ring")
    with pytest.raises(ConfigError, match="no file can be read there: No such file"):
        read_layout(str(tmp_path / "missing.json"), "ring")


def test_jaccl_needs_the_devices_of_every_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs `rdma` for every host"):
        read_layout(saved(tmp_path, [MACS[0], {**MACS[1], "rdma": []}]), "jaccl")
