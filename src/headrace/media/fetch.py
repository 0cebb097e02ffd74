"""Fetches the bytes of a media item from its source."""

from __future__ import annotations

import asyncio
import re

from headrace.errors import InvalidRequest
from headrace.media.inline import decode_base64, is_plain_base64, read_data_url
from headrace.media.local import read_file
from headrace.media.remote import RemoteMedia
from headrace.types.media import MediaPolicy

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")


class MediaFetcher:
    """Fetches under one policy."""

    def __init__(self, policy: MediaPolicy, *, remote: RemoteMedia | None = None) -> None:
        """remote: None fetches from the network under the same policy."""
        self._policy = policy
        self._remote = remote or RemoteMedia(policy)

    async def read(self, source: str, param: str) -> bytes:
        """The bytes of a `data:`, http(s) or `file:` URL, a path, or plain base64.

        param: the source's field. Raises InvalidRequest that names it.
        """
        match = _SCHEME.match(source[:32])
        scheme = match[1].lower() if match else ""
        if scheme in ("http", "https"):
            return await self._remote.read(source.strip(), param)
        return await asyncio.to_thread(self._read_here, source, scheme, param)

    def _read_here(self, source: str, scheme: str, param: str) -> bytes:
        policy = self._policy
        if scheme == "data":
            return read_data_url(source.lstrip(), policy.max_bytes, param)
        if scheme not in ("", "file"):
            raise InvalidRequest(f"{param}: {scheme}: URLs are not read, only data:, http: and https:", param=param)
        if not scheme and is_plain_base64(source):
            return decode_base64(source, policy.max_bytes, param)
        if not source.strip():
            raise InvalidRequest(f"{param} must not be empty", param=param)
        return read_file(source, policy.root, policy.max_bytes, param)
