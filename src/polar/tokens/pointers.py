"""Authenticated references from an answer's ids, signatures and encrypted blobs back to the completion that made them.

A reference is 26 lower-case hex digits: 8 of the completion's number and 18 of a truncated HMAC-SHA256 under the session's secret
(72 bits; a guess is worth nothing, since a reference only ever names a turn of its own session). It survives whatever a dialect
or a harness wraps around it: prefixes (`call_`, `toolu_`), index suffixes and base64. Knows no dialect and keeps nothing, so it
works after a restart.
"""

from __future__ import annotations

import binascii
import hmac
import re

LENGTH = 26
_NUMBER_BYTES = 4
_MAC_BYTES = 9
_DOMAIN = b"polar.reference.v1:"
_HEX = re.compile(r"[0-9a-f]{26,}")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{34,}")
_URLSAFE = str.maketrans("-_", "+/")
_MAX_CHECKS = 256
"""How many places of one text are tried: a foreign blob of hex digits must not cost more than a few hundred microseconds."""


_MAX_TEXT = 4096
"""How much of a text is read: what this gateway issues is a hundredth of it, a foreign signature may have megabytes."""


def mint(secret: bytes, number: int) -> str:
    """The reference of completion `number` (0 <= number < 2**32) under `secret`."""
    body = number.to_bytes(_NUMBER_BYTES, "big")
    return (body + _mac(secret, body)).hex()


def find(secret: bytes, text: str) -> int | None:
    """The number of the completion that `text` refers to, or `None` if it holds no reference of this session.

    Looks for a reference anywhere in the text as it stands, then in what its base64 runs (standard or URL-safe, padded or not, at any
    alignment) decode to. Broken and foreign references give `None`; comparison is in constant time.
    """
    text = text[:_MAX_TEXT]
    found = _scan(secret, text)
    if found is not None:
        return found
    for run in _BASE64.finditer(text):
        blob = run.group().translate(_URLSAFE)
        for start in range(4):
            piece = blob[start:]
            piece = piece[: len(piece) - 1] if len(piece) % 4 == 1 else piece
            try:
                decoded = binascii.a2b_base64(piece + "=" * (-len(piece) % 4))
            except binascii.Error:
                continue
            found = _scan(secret, decoded.decode("latin-1"))
            if found is not None:
                return found
    return None


def _scan(secret: bytes, text: str) -> int | None:
    checks = 0
    for run in _HEX.finditer(text):
        digits = run.group()
        for start in range(len(digits) - LENGTH + 1):
            checks += 1
            if checks > _MAX_CHECKS:
                return None
            raw = bytes.fromhex(digits[start : start + LENGTH])
            body, mac = raw[:_NUMBER_BYTES], raw[_NUMBER_BYTES:]
            if hmac.compare_digest(mac, _mac(secret, body)):
                return int.from_bytes(body, "big")
    return None


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, _DOMAIN + body, "sha256")[:_MAC_BYTES]
