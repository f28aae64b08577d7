"""JSON that every reader takes for one line. Knows nothing but text."""


def one_line(text: bytes) -> bytes:
    """JSON text without U+0085, U+2028 and U+2029. They may stand in JSON, but many readers of lines and streams (all that use
    `str.splitlines`, and so httpx's `iter_lines`) end a line at them, and find half a value."""
    if text.isascii():
        return text
    return text.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029").replace(b"\xc2\x85", b"\\u0085")
