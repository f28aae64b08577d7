"""Reading a request's body: size cap, gzip and zstd, JSON. Every fault of it is a `CallError` that says what to do."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson
import zstandard

from polar.chat import JsonObject
from polar.errors import InvalidRequest, TooLarge

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_SURROGATE = re.compile("[\ud800-\udfff]")


class ClientLeft(Exception):
    """The connection closed before the body was complete."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The raw body. Raises `TooLarge` as soon as it passes `limit` bytes."""
    chunks: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientLeft
        chunk = event.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not event.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def decompress(raw: bytes, encoding: str, limit: int) -> bytes:
    """The body without its `Content-Encoding`, never more than `limit` bytes of it."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return raw
    try:
        if encoding in ("gzip", "x-gzip", "deflate"):
            data = _inflate(raw, limit)
        elif encoding == "zstd":
            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as reader:
                data = reader.read(limit + 1)
        else:
            raise InvalidRequest(
                f"Content-Encoding {encoding!r} is not supported; send gzip, zstd or none.", param="Content-Encoding", status=415
            )
    except (zlib.error, zstandard.ZstdError) as error:
        raise InvalidRequest(f"the body is not valid {encoding}: {error}", param="Content-Encoding") from error
    if len(data) > limit:
        raise _too_large(limit)
    return data


def _inflate(raw: bytes, limit: int) -> bytes:
    """All members of a gzip or zlib body (RFC 1952 allows several), as far as one byte beyond `limit`."""
    data = b""
    while raw and len(data) <= limit:
        inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
        data += inflater.decompress(raw, limit + 1 - len(data))
        raw = inflater.unused_data
    return data


def parse_json(raw: bytes) -> JsonObject:
    """The body as a JSON object. Lone surrogates become U+FFFD (docs/decisions.md); a byte order mark is passed over (RFC 8259)."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        body = _lenient(raw, error)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", param="body")
    return body


def _lenient(raw: bytes, error: orjson.JSONDecodeError) -> Any:
    """A second try for the one thing that orjson refuses and real clients send: an escaped lone surrogate."""
    refusal = InvalidRequest(f"the body is not valid JSON: {error}", param="body")
    if b"\\u" not in raw:
        raise refusal from error
    try:
        return _clean(json.loads(raw, parse_constant=_no_constant))
    except (ValueError, RecursionError) as second:
        raise refusal from second


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("�", value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than the {limit // (1024 * 1024)} MB that this gateway accepts (max_body_mb)")
