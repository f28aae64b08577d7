"""The small engine server: transformers on a CPU (or the GPU that is there), speaking the vLLM subset that the gateway uses.

Importing this package imports no torch; `serve` does.
"""

from __future__ import annotations

from polar.engine.api import ApiError, Backend, Job, Params, Step, Template, Tokenizer
from polar.engine.serve import build, serve
from polar.engine.server import Server
from polar.engine.text import ByteTokenizer, JinjaTemplate, load_text

__all__ = [
    "ApiError",
    "Backend",
    "ByteTokenizer",
    "JinjaTemplate",
    "Job",
    "Params",
    "Server",
    "Step",
    "Template",
    "Tokenizer",
    "build",
    "load_text",
    "serve",
]
