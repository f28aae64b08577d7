"""Decoding by tokens, for byte-level vocabularies: a third of what the tokenizers library takes, to the same text.

In such a vocabulary each token stands for bytes and a text is the sum of its tokens' bytes, whatever is around them. The bytes of a token
come from the library, once, and are remembered. Knows no special tokens: they decode to how they are written.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}
"""The byte of each of byte-level BPE's letters: those that can be seen are their own, the others were moved up."""


class Pieces(dict[int, bytes]):
    """The bytes of each token that was asked for. Safe to use from several threads: a token that two of them meet is looked up twice."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD. An id outside the vocabulary decodes to nothing."""
        return b"".join(map(self.__getitem__, ids)).decode("utf-8", "replace")

    def __missing__(self, one: int) -> bytes:
        token = self._backend.id_to_token(int(one))
        if token is None:  # not remembered: there is no end of such ids
            return b""
        try:
            piece = bytes(_BYTES[letter] for letter in token)
        except KeyError:  # an added token that is not written in those letters
            piece = token.encode()
        self[int(one)] = piece
        return piece


def pieces_of(backend: Backend) -> Pieces | None:
    """The pieces of a vocabulary whose decoder is nothing but byte-level; `None` for any other."""
    return Pieces(backend) if isinstance(backend.decoder, decoders.ByteLevel) else None
