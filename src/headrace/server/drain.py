"""The drain: before shutdown, a server finishes its requests and refuses new ones as gateways expect."""

from __future__ import annotations

from headrace.errors import Draining

_RETRY_AFTER_S = 1.0
"""By then a gateway or load balancer sends requests to another server."""


class Drain:
    def __init__(self) -> None:
        self.has_begun = False

    def begin(self) -> None:
        self.has_begun = True

    def refuses(self, method: str, path: str) -> bool:
        """Whether a request would be new work.

        All methods but POST are served to the end, and so are cancelling and rendering Markdown for the page.
        """
        return self.has_begun and method == "POST" and not path.endswith(("/cancel", "/markdown"))


def draining_error() -> Draining:
    return Draining("the server is shutting down and takes no new requests", retry_after_s=_RETRY_AFTER_S)
