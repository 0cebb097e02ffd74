"""Starts replicas under Ray Serve, and ends them."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from headrace.config import Config, ReplicasConfig
from headrace.errors import ConfigError
from headrace.replicas.loaded import LoadedReplica
from headrace.replicas.replica import Replica
from headrace.replicas.route import ROUTE_HEADER
from headrace.server.run import KEEP_ALIVE_S

APPLICATION = "headrace"

_OBJECT_STORE_BYTES = 100_000_000
"""About the least that Ray takes: neither bodies nor answers go through it."""

_MAX_ONGOING = 100_000
"""Requests of a replica. Its own queue sets the limit (--max-queue), with an error that clients know."""

_MEMORY_SHARE = 0.9
"""Of a host without GPUs, for all its replicas together, as for one server."""

_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 30.0

_DRAIN_MARGIN_S = 2.0
"""Beyond --drain-seconds, in which a replica ends its engine."""

_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
"""Of Ray Serve itself. Each request has a line in our log already."""

_SERVE_SETTINGS = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "headrace.replicas.front.middleware",
    "RAY_SERVE_SESSION_ID_HEADER_KEY": ROUTE_HEADER,
    # Ray forgets a replica's load after 10 s without a new request, and streams take longer.
    "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "86400",
    # Ray kills a proxy that takes three times this long to start; its 5 s are too few on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Both halve the proxy's work for each event of a stream.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Environment of Ray Serve's processes, which has no other way to set these."""


def serve_replicas(
    config: Config, load: Callable[[Config], LoadedReplica], port: int, announce: Callable[[], None]
) -> None:
    """Serve until SIGINT or SIGTERM. `announce` is called once the replicas are ready.

    load: see Replica. port: one that is free. Raises ConfigError where Ray can't be used or can't start the replicas.
    """
    _join_cluster(config.replicas)
    try:
        serve.start(
            proxy_location="EveryNode",
            http_options={"host": config.server.host, "port": port, "keep_alive_timeout_s": KEEP_ALIVE_S},
            logging_config=_LOGGING,
            controller_options={"runtime_env": {"env_vars": _SERVE_SETTINGS}},
        )
        options = _options(config)
        deployment = serve.deployment(serve.ingress()(Replica)).options(**options)
        num_on_host = _num_on_host(config.replicas)
        if not options["ray_actor_options"]["num_gpus"] and config.engine.gpu_memory_utilization is None:
            share = _MEMORY_SHARE / num_on_host
            config = replace(config, engine=replace(config.engine, gpu_memory_utilization=share))
        serve.run(deployment.bind(config, load, num_on_host), name=APPLICATION, logging_config=_LOGGING)
        ended = _signalled()
        announce()
        ended.wait()
        serve.delete(APPLICATION)
    except (RuntimeError, RayError) as error:
        raise ConfigError(f"Ray Serve: {error}") from error
    finally:
        serve.shutdown()
        ray.shutdown()


def _join_cluster(asked: ReplicasConfig) -> None:
    """Connect to the cluster that was asked for, or start one."""
    if asked.ray_address is not None:
        try:
            ray.init(address=asked.ray_address, logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"--ray-address {asked.ray_address}: {error}") from error
        return
    most = asked.max_replicas or asked.replicas
    ray.init(
        address="local",
        # Each replica takes a core of Ray's count, whether or not there are so many.
        num_cpus=max(os.cpu_count() or 1, most),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
    )


def _options(config: Config) -> dict[str, Any]:
    """Of Ray Serve's deployment."""
    asked, found = config.replicas, ray.cluster_resources()
    num_gpus = asked.num_gpus_per_replica
    if num_gpus is None:
        num_gpus = 1 if found.get("GPU", 0) >= 1 else 0
    most = asked.max_replicas or asked.replicas
    if num_gpus * most > found.get("GPU", 0):
        raise ConfigError(f"{most} replicas need {num_gpus * most} GPUs, and Ray finds {found.get('GPU', 0):g}")
    # Ray also sets OMP_NUM_THREADS to it, so that the replicas of a host without GPUs share its cores.
    num_cpus = 1 if num_gpus else max(1, int(found.get("CPU", 1)) // most)
    return {
        "name": APPLICATION,
        "max_ongoing_requests": _MAX_ONGOING,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus},
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": config.server.drain_seconds + _DRAIN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "request_router_config": RequestRouterConfig(
            request_router_class="headrace.replicas.router.ConversationRouter"
        ),
        **_number(config),
    }


def _num_on_host(asked: ReplicasConfig) -> int:
    """Replicas on one host, if Ray spreads as many as there may be over all hosts."""
    num_hosts = len([each for each in ray.nodes() if each["Alive"]])
    return math.ceil((asked.max_replicas or asked.replicas) / num_hosts)


def _number(config: Config) -> dict[str, Any]:
    """How many replicas: a fixed number, or as many as keep their rows busy without a queue."""
    asked = config.replicas
    if asked.max_replicas is None:
        return {"num_replicas": asked.replicas}
    fewest = asked.min_replicas or 1
    if fewest > asked.max_replicas:
        raise ConfigError(f"--min-replicas {fewest} is more than --max-replicas {asked.max_replicas}")
    scaling = AutoscalingConfig(
        min_replicas=fewest, max_replicas=asked.max_replicas, target_ongoing_requests=config.engine.max_num_seqs
    )
    return {"autoscaling_config": scaling}


def _signalled() -> threading.Event:
    """Set by SIGINT or SIGTERM; another one raises KeyboardInterrupt."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, end)
    return ended
