"""The columns of each form of export: name, type, and what they say. The Parquet schema, the data card and its features come from here.

Knows no rows. Messages hold `weight`, OpenAI's field for whether an assistant message is trained (1) or only read (0). Tools, and the
messages of training rows, are JSON text: a tool's parameters are any JSON, which a table's fixed types would fill with nulls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from polar.export.spec import Form

Kind = Literal["text", "number", "count", "ids", "bits", "floats", "messages"]


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: Kind
    meaning: str


_ORIGIN = (
    Column("session_id", "text", "the session that the row comes from"),
    Column("rollout_id", "text", "the sample of the task; all rows of a sample share it"),
    Column("group_id", "text", "the samples of one task at one policy version"),
    Column("task", "text", "the task's name"),
    Column("repository", "text", "where the task comes from"),
    Column("harness", "text", "the agent program; where the session's metadata do not name it, guessed from the calls' headers"),
    Column("role", "text", "main, sub_agent, ...: what the conversation was for"),
    Column("reward", "number", "the outcome as credited to this row; null for none"),
    Column("finish_reason", "text", "how its last answer ended"),
)

_RL = (
    Column("prompt_ids", "ids", "token ids before the first sampled one"),
    Column("response_ids", "ids", "token ids from the first sampled one on: answers and what the harness put between them"),
    Column("loss_mask", "bits", "for each response id, whether it is trained (1)"),
    Column("response_logprobs", "floats", "for each response id, its log-probability when it was sampled; 0 where the mask is 0"),
    Column("prompt_messages", "text", "JSON: the messages before the first answer"),
    Column("response_messages", "text", "JSON: the messages from the first answer on"),
    Column("tools", "text", "JSON: the tools as the model saw them; null for none"),
    Column("metadata", "text", "JSON: spans with policy version and sampling parameters, tags, faithful, cut"),
)

_CHAT = (
    Column("messages", "messages", "the conversation; `weight` 1 marks the answers to train"),
    Column("tools", "text", "JSON: the tools as the model saw them; null for none"),
    Column("tokens", "count", "the row's length in tokens of the model that made it"),
)

_TOKENS = (
    Column("input_ids", "ids", "token ids, exactly as the model saw and sampled them"),
    Column("attention_mask", "bits", "1 everywhere"),
    Column("labels", "ids", "the id where it is trained, else -100"),
)

COLUMNS: dict[Form, tuple[Column, ...]] = {"rl": (*_ORIGIN, *_RL), "chat": (*_CHAT, *_ORIGIN), "tokens": (*_TOKENS, *_ORIGIN)}


def schema(form: Form) -> Any:
    """The form's `pyarrow.Schema`."""
    import pyarrow as pa

    call = pa.struct(
        [("id", pa.string()), ("type", pa.string()), ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())]))]
    )
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("reasoning_content", pa.string()),
            ("tool_calls", pa.list_(call)),
            ("tool_call_id", pa.string()),
            ("name", pa.string()),
            ("weight", pa.int8()),
        ]
    )
    types = {
        "text": pa.string(),
        "number": pa.float64(),
        "count": pa.int64(),
        "ids": pa.list_(pa.int32()),
        "bits": pa.list_(pa.int8()),
        "floats": pa.list_(pa.float32()),
        "messages": pa.list_(message),
    }
    return pa.schema([(column.name, types[column.kind]) for column in COLUMNS[form]])


_DTYPES = {"text": "string", "number": "float64", "count": "int64"}
_LISTS = {"ids": "int32", "bits": "int8", "floats": "float32"}


def features(form: Form) -> list[dict[str, Any]]:
    """The same for the head of a data card, so that JSON lines load with the same types."""
    found: list[dict[str, Any]] = []
    for column in COLUMNS[form]:
        if column.kind == "messages":
            texts = [{"name": name, "dtype": "string"} for name in ("role", "content", "reasoning_content")]
            function = [{"name": name, "dtype": "string"} for name in ("name", "arguments")]
            call = [{"name": "id", "dtype": "string"}, {"name": "type", "dtype": "string"}, {"name": "function", "struct": function}]
            rest = [{"name": name, "dtype": "string"} for name in ("tool_call_id", "name")]
            fields = [*texts, {"name": "tool_calls", "list": call}, *rest, {"name": "weight", "dtype": "int8"}]
            found.append({"name": column.name, "list": fields})
        elif column.kind in _LISTS:
            found.append({"name": column.name, "list": _LISTS[column.kind]})
        else:
            found.append({"name": column.name, "dtype": _DTYPES[column.kind]})
    return found
