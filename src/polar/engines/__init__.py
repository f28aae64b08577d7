"""The inference servers, one file each. Importing this package registers them all."""

from polar.engines import openai, sglang, vllm  # noqa: F401  (they register themselves)
from polar.engines.base import (
    Chunk,
    Engine,
    EngineInfo,
    Floats,
    Generation,
    Ids,
    MessagesRequest,
    Mode,
    TokensRequest,
    register,
    registered,
)

__all__ = [
    "Chunk",
    "Engine",
    "EngineInfo",
    "Floats",
    "Generation",
    "Ids",
    "MessagesRequest",
    "Mode",
    "TokensRequest",
    "register",
    "registered",
]
