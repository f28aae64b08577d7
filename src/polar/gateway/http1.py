"""uvicorn's HTTP/1.1 with one fault less: a request that offers another protocol keeps its body.

Java's own HttpClient (and so Ktor, JetBrains' assistants, DBeaver, langchain4j) offers HTTP/2 with every request to an `http:` address. A
server that doesn't want it answers as if nothing had been offered (RFC 9110, section 7.8). Parser and server here drop the body instead,
or take it for the next request (Kludex/uvicorn#2722, vllm-project/vllm#57203, Soju06/codex-lb#1757).

Invariant: the app sees each such request once, whole, with its `Upgrade` header; which offers it refuses is its own affair.
"""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Http1(HttpToolsProtocol):
    """The parser stops behind the head of a request with an offer. The head is then parsed again, by a new parser and without the word
    that made it an offer, with the body behind it."""

    _again: bytes | None = None
    """The head to be parsed again, while the parser is about to stop."""

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            except httptools.HttpParserUpgrade as stop:
                if self._again is not None:  # else it is a CONNECT, which the app has seen already
                    self.parser = httptools.HttpRequestParser(self)
                    data = self._again + data[stop.args[0] :]
                    continue
            return

    def on_headers_complete(self) -> None:
        offered = self.parser.should_upgrade() and any(
            name == b"connection" and b"upgrade" in _words(value) for name, value in self.headers
        )
        self._again = self._head() if offered else None
        if not offered:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._again is None:
            super().on_message_complete()

    def _head(self) -> bytes:
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            kept = b", ".join(word for word in _words(value) if word != b"upgrade") if name == b"connection" else value
            lines.append(name + b": " + kept)
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _words(value: bytes) -> list[bytes]:
    return [word.strip() for word in value.lower().split(b",")]
