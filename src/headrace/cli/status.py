"""`headrace status [URL]`: what a server is doing, in the terminal."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live

from headrace.bench.plan import parse_url
from headrace.cli.launch_server import address
from headrace.cli.status_view import StatusView
from headrace.config_loading import load_config
from headrace.errors import ConfigError

_TIMEOUT_S = 10.0
"""An answer takes up to a step of the engine."""


def run(given: argparse.Namespace) -> None:
    """Show the status once, or until Ctrl-C. Raises ConfigError if the server has none to show at first."""
    if given.url is None:
        server = load_config((), sections=("server",)).server
        url, key = address(server), given.api_key or server.api_key
    else:
        url, key = parse_url(given.url, "URL"), given.api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    console = Console(highlight=False)
    with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S) as http:
        body = read_status(http)
        if given.json:
            print(json.dumps(body, indent=1, ensure_ascii=False))
        elif given.once or not console.is_terminal or console.is_dumb_terminal:
            console.print(StatusView(body, url))
        else:
            _watch(lambda: read_status(http), StatusView(body, url), console, given.interval)


def _watch(read: Callable[[], Any], view: StatusView, console: Console, interval_s: float) -> None:
    """Until Ctrl-C. While the server does not answer, the last status stays, with the reason."""
    try:
        with Live(view, console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(view, refresh=True)
                time.sleep(interval_s)
                try:
                    view = StatusView(read(), view.url)
                except ConfigError as error:
                    view = StatusView(view.body, view.url, trouble=error.message)
    except KeyboardInterrupt:
        console.print(view)


def read_status(http: httpx.Client) -> Any:
    """The body of /v1/status. Raises ConfigError if there is none."""
    url = str(http.base_url).rstrip("/")
    try:
        response = http.get("/v1/status")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"nothing answers at {url} ({reason}); `headrace serve` starts a server") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError.of_key(url, "--api-key", is_given="authorization" in http.headers)
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.is_error and isinstance(body, dict) and isinstance(refusal := body.get("error"), dict):
        raise ConfigError(f"the server at {url} answers with an error: {refusal.get('message')}")
    if response.is_error or not isinstance(body, dict) or "counters" not in body:
        raise ConfigError(f"what answers at {url} is no Headrace server: it has no /v1/status")
    return body
