"""Which ranks there are, and where: from `--ranks`."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

LOCAL = "127.0.0.1"

FIRST_PORT = 32323
"""Of MLX's connections where ranks are on several hosts, as in mlx.launch; rank 0's messages take the one before."""


@dataclass(frozen=True, slots=True)
class RankHost:
    """ssh: how this host reaches it; None for this host itself. ip: by which the ranks reach each other.

    rdma: with jaccl its device towards each rank, None towards itself.
    """

    ip: str
    ssh: str | None = None
    rdma: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """backend: of MLX's distributed groups. ports: of MLX's connections, one for each rank."""

    backend: str
    hosts: tuple[RankHost, ...]
    ports: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def is_local(self) -> bool:
        return all(host.ssh is None for host in self.hosts)

    @property
    def connections(self) -> list[list[str | None]]:
        """The content of the file from which MLX reads whom to connect to."""
        if self.backend == "jaccl":
            return [list(host.rdma) for host in self.hosts]
        return [[f"{host.ip}:{port}"] for host, port in zip(self.hosts, self.ports, strict=True)]

    def variables(self, rank: int, connections: Path) -> dict[str, str]:
        """The environment in which MLX's `distributed.init` finds the others. connections: the file that holds them."""
        rank_0 = self.hosts[0].ip
        found = {"MLX_RANK": str(rank)}
        if self.backend == "nccl":
            return {**found, "NCCL_HOST_IP": rank_0, "NCCL_PORT": str(self.ports[0]), "MLX_WORLD_SIZE": str(self.size)}
        if self.backend == "jaccl":
            coordinator = f"{rank_0}:{self.ports[0]}"
            return {**found, "MLX_IBV_DEVICES": str(connections), "MLX_JACCL_COORDINATOR": coordinator}
        return {**found, "MLX_HOSTFILE": str(connections)}

    def device(self, rank: int) -> int:
        """The number of the rank's GPU among those of its host."""
        return self.hosts[:rank].count(self.hosts[rank])


def read_layout(ranks: str, backend: str) -> Layout:
    """From `--ranks`: a number of processes on this host, or a file of hosts. Raises ConfigError."""
    if ranks.isdecimal():
        size = int(ranks)
        if size < 2:
            raise ConfigError("--ranks must be at least 2, or a file of hosts")
        return Layout(backend, (RankHost(LOCAL),) * size, _free_ports(size))
    hosts = _read_hosts(Path(ranks).expanduser())
    if backend == "jaccl" and any(len(host.rdma) != len(hosts) for host in hosts):
        raise ConfigError("--ranks-backend jaccl needs `rdma` for every host, with a device for each rank")
    return Layout(backend, hosts, tuple(range(FIRST_PORT, FIRST_PORT + len(hosts))))


def _read_hosts(path: Path) -> tuple[RankHost, ...]:
    """mlx.launch's file: a JSON list of objects with `ssh` and `ips`. The first one is this host."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--ranks: {path} is no number, and no file can be read there: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--ranks: {path} is not JSON: {error}") from error
    if isinstance(found, Mapping):
        found = found.get("hosts")
    if not isinstance(found, list) or len(found) < 2:
        raise ConfigError(f"--ranks: {path} must list at least two hosts")
    hosts = [_read_host(path, number, each) for number, each in enumerate(found)]
    return (replace(hosts[0], ssh=None), *hosts[1:])


def _read_host(path: Path, number: int, found: Any) -> RankHost:
    ssh = found.get("ssh") if isinstance(found, Mapping) else None
    ips = _texts(found.get("ips")) if isinstance(found, Mapping) else []
    if not isinstance(ssh, str) or not ssh or ssh.startswith("-"):
        raise ConfigError(f"--ranks: host {number} of {path} needs `ssh`, the name by which ssh reaches it")
    if not ips:
        raise ConfigError(f"--ranks: host {number} of {path} needs `ips`, a list with its address")
    rdma = found.get("rdma") or ()
    if not isinstance(rdma, Sequence) or any(each is not None and not isinstance(each, str) for each in rdma):
        raise ConfigError(f"--ranks: `rdma` of host {number} of {path} must be a list of names and null")
    return RankHost(ips[0], None if ssh in (LOCAL, "localhost") else ssh, tuple(rdma))


def _texts(found: Any) -> list[str]:
    """Empty unless it is a list of texts."""
    return found if isinstance(found, list) and all(isinstance(each, str) and each for each in found) else []


def _free_ports(number: int) -> tuple[int, ...]:
    with ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(number)]
        for each in opened:
            each.bind((LOCAL, 0))
        return tuple(each.getsockname()[1] for each in opened)
