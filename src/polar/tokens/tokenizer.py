"""Tokenizers without transformers: a small adapter over the `tokenizers` library.

Satisfies the `Tokenizer` and `OffsetTokenizer` protocols of `renderers`. Never adds special tokens of its own accord (a rendered prompt
already has its BOS) and never cleans up whitespace. Knows no messages and no templates beyond their text.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.tokens.pieces import pieces_of
from polar.tokens.words import word_encoder

_LONG = 4_000
"""Characters from which on a text is encoded as a batch of one: that releases the interpreter's lock, which `encode` holds to its end
(measured, tokenizers 0.23: 100 ms for 130,000 characters)."""
_FOLDED = 16
"""Ids from which on a text is folded."""


class Tokenizer:
    """Text to ids and back, exactly. Safe to use from several threads.

    `hash` is the SHA-256 (hex) of tokenizer.json with added tokens, `template_hash` that of the chat template's text (`None` without one).
    """

    def __init__(self, backend: Backend, *, name_or_path: str, config: JsonObject, chat_template: str | None, hash: str) -> None:
        self.backend = backend
        self._pieces = pieces_of(backend)
        self.decodes_in_pieces = self._pieces is not None
        """Whether the texts of two runs of ids, the first of whole characters, are together the text of both: so it is where each token
        stands for its bytes, and not where the first token of a text loses a space."""
        self._words = word_encoder(backend)
        self.name_or_path = name_or_path
        self.config = config
        self.chat_template = chat_template
        self.hash = hash
        self.template_hash = None if chat_template is None else hashlib.sha256(chat_template.encode()).hexdigest()
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.unk_token_id = self._id(_token_text(config.get("unk_token")))
        self.eos_token_id = self._id(self.eos_token)
        self.bos_token_id = self._id(self.bos_token)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str, *, add_special_tokens: bool = False, return_offsets_mapping: bool = False, **_: Any) -> dict[str, Any]:
        """`input_ids`, and `offset_mapping` (pairs of character positions) where asked for."""
        encoding = self.backend.encode(_sound(text), add_special_tokens=add_special_tokens)
        answer: dict[str, Any] = {"input_ids": encoding.ids}
        if return_offsets_mapping:
            answer["offset_mapping"] = encoding.offsets
        return answer

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        text = _sound(text)
        if self._words is not None and not add_special_tokens:
            return self._words.encode(text, self._whole)
        return self._whole(text, add_special_tokens)

    def _whole(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """As the library encodes it."""
        if len(text) > _LONG:
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Bytes that are no UTF-8 become U+FFFD. An id outside the vocabulary decodes to nothing."""
        ids = [token_ids] if isinstance(token_ids, int) else _as_list(token_ids)
        if self._pieces is not None and not skip_special_tokens:
            return self._pieces.decode(ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or the ids of several; the unknown token's id (`None` where there is none) for one not in the vocabulary."""
        if isinstance(tokens, str):
            found = self.backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        return [self.backend.id_to_token(int(one)) for one in ids]

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


class PlainTokenizer:
    """A view without character offsets. Renderers then skip per-token attribution, which the prompt path has no use for: same ids, half
    the time."""

    def __init__(self, tokenizer: Any) -> None:
        self.name_or_path: str = tokenizer.name_or_path
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.bos_token_id: int | None = getattr(tokenizer, "bos_token_id", None)
        self.bos_token: str | None = getattr(tokenizer, "bos_token", None)
        self.eos_token: str | None = getattr(tokenizer, "eos_token", None)
        self.chat_template: str | None = getattr(tokenizer, "chat_template", None)
        self.encode = tokenizer.encode
        self.decode = tokenizer.decode
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

    @contextmanager
    def folding(self) -> Iterator[list[list[int]]]:
        """A view that folds nothing."""
        yield []


class FoldingTokenizer(PlainTokenizer):
    """Stands for the ids of each longer text by one number, so that a renderer which takes ids one by one has one to take, not thousands.

    Inside `folding()`, which gives the texts' ids, `encode` gives `[-1]` for the first such text, `[-2]` for the second; `unfolded` puts
    the ids back. Only for renderers that do not look at a text's ids. Threads do not see each other's folding.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._encode = self.encode
        self.encode = self._fold
        self._local = threading.local()

    @contextmanager
    def folding(self) -> Iterator[list[list[int]]]:
        texts: list[list[int]] = []
        self._local.texts = texts
        try:
            yield texts
        finally:
            self._local.texts = None

    def _fold(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self._encode(text, **options)
        texts: list[list[int]] | None = getattr(self._local, "texts", None)
        if texts is None or len(ids) < _FOLDED:
            return ids
        texts.append(ids)
        return [-len(texts)]


def unfolded(ids: list[int], texts: list[list[int]]) -> list[int]:
    """Ids that were made inside `folding()`, with those of the texts put back."""
    if not texts:
        return ids
    out: list[int] = []
    start = 0
    for number, text in enumerate(texts, 1):
        place = ids.index(-number, start)
        out += ids[start:place]
        out += text
        start = place + 1
    return out + ids[start:]


def load_tokenizer(source: Path | str, *, name: str | None = None) -> Tokenizer:
    """Loads a directory with tokenizer.json (and tokenizer_config.json, chat_template.jinja), or a tokenizer.json itself.

    `name` is what `name_or_path` shall say where the directory's own name does not tell the model. Raises `ConfigError` if there is no
    tokenizer.json or it cannot be read.
    """
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer.json at {file}; point --tokenizer at the directory of the model")
    raw = file.read_bytes()
    try:
        backend = Backend.from_buffer(raw)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file} is not a tokenizer.json that the tokenizers library reads: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    config = _read_json(file.parent / "tokenizer_config.json")
    added = _add_missing(backend, config, file)
    digest = hashlib.sha256(raw)
    digest.update(orjson.dumps(added))
    template = _chat_template(config, file.parent)
    return Tokenizer(backend, name_or_path=name or str(source), config=config, chat_template=template, hash=digest.hexdigest())


def _read_json(file: Path) -> JsonObject:
    if not file.is_file():
        return {}
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold an object")
    return value


def _add_missing(backend: Backend, config: JsonObject, file: Path) -> list[tuple[int, str]]:
    """Adds the tokens that only tokenizer_config.json names, as transformers does; their ids must come out as written there."""
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return []
    missing = sorted((int(key), entry) for key, entry in decoder.items() if backend.id_to_token(int(key)) is None)
    added: list[tuple[int, str]] = []
    for number, entry in missing:
        token = AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", False),
            special=entry.get("special", False),
        )
        if entry.get("special"):
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
        if backend.token_to_id(entry["content"]) != number:
            raise ConfigError(f"{file}: added token {entry['content']!r} should have id {number} but the vocabulary gives it another")
        added.append((number, entry["content"]))
    return added


def _chat_template(config: JsonObject, directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, str):
        return template
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        default = named.get("default")
        return default if isinstance(default, str) else None
    return None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _as_list(ids: Sequence[int] | Iterable[int]) -> list[int]:
    tolist = getattr(ids, "tolist", None)
    return tolist() if tolist is not None else list(ids)


def _sound(text: str) -> str:
    """Text that has an UTF-8 form: halves of surrogate pairs are joined, lone ones become U+FFFD. Costs nothing where all is well."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
