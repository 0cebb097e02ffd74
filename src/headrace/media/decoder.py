"""Decodes in helper processes: a file made to hang, crash or exhaust memory only fails its own request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from headrace.errors import InvalidRequest
from headrace.isolation import errors_as
from headrace.media import prepare
from headrace.sandbox import LimitExceeded, Sandbox
from headrace.types.media import MediaLimits

Result = TypeVar("Result")

MAX_DECODERS = 2
"""Items decoded at once: the engine needs the processor, too."""

# A process with its libraries takes a quarter of this.
_BASE_BYTES = 512 * 1024 * 1024

# Per pixel of the largest allowed picture or frame. Pillow takes 4, for WebP temporarily 16, and the model's pixels 3.
_BYTES_PER_PIXEL = 24


class MediaDecoder:
    """Calls functions of this room in helper processes, shared by all decoders with the same limits."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._sandbox = _sandbox(_BASE_BYTES + _BYTES_PER_PIXEL * limits.image_pixels)

    def run(self, function: Callable[..., Result], /, *args: object, param: str, is_video: bool) -> Result:
        """The function's result.

        Raises InvalidRequest that names `param`, also when a limit is exceeded, and ContextTooLong. Our own errors, and
        OSError if no process can be started, pass through; the functions translate decoders' errors.
        """
        timeout_s = self._limits.video_decode_s if is_video else self._limits.image_decode_s
        try:
            panic = InvalidRequest(f"{param}: it can't be decoded", param=param)
            with errors_as(lambda _: panic, passing=(Exception,)):
                return self._sandbox.run(function, *args, timeout_s=timeout_s)
        except LimitExceeded as error:
            reasons = {
                "time": f"decoding it takes more than {timeout_s:g} s",
                "memory": "decoding it takes more memory than the server's limit",
                "crash": "decoding it has crashed the decoder",
            }
            raise InvalidRequest(f"{param}: {reasons[error.reason]}", param=param) from error

    def start_process(self) -> None:
        """Start a process in the background, so that the first item does not wait for its imports."""
        self._sandbox.run_in_background(_import_libraries, timeout_s=self._limits.image_decode_s)


@functools.cache
def _sandbox(max_bytes: int) -> Sandbox:
    return Sandbox(num_processes=MAX_DECODERS, max_bytes=max_bytes)


def _import_libraries() -> None:
    assert prepare, "which imports them"
