"""`polar engine`: loads a model and serves it."""

from __future__ import annotations

import socket
from pathlib import Path

from polar.engine.server import Server
from polar.engine.text import load_text
from polar.errors import ConfigError

SMALL_BYTES = 64 << 20


def build(
    model: str,
    *,
    served_name: str | None = None,
    max_model_len: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    max_sequences: int = 32,
) -> Server:
    """Loads `model` (a directory or a known name) and makes its server; needs torch and transformers."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from polar.engine.models import resolve
    from polar.engine.worker import TransformersBackend

    disable_progress_bar()
    directory = resolve(model)
    threads = threads or _threads(directory)
    if threads is not None:
        torch.set_num_threads(threads)
    tokenizer, template = load_text(directory)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = TransformersBackend(
        directory,
        name=served_name or (Path(model).name if Path(model).exists() else model),
        eos_ids=tokenizer.eos_ids,
        context=max_model_len,
        device=device,
        max_sequences=max_sequences,
    )
    return Server(backend, tokenizer, template)


def _threads(directory: Path) -> int | None:
    """One thread for a model that is small: its operations are over before a second thread has woken, and on a busy machine
    waiting for that one costs ten times more than it brings (measured: 12 against 173 tokens a second). `None`: as torch likes."""
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return 1 if size < SMALL_BYTES else None


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_name: str | None = None,
    max_model_len: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    max_sequences: int = 32,
) -> None:
    """Serves until interrupted (port 0: a free one). Raises `ConfigError` for an address that can't be had before loading."""
    import uvicorn

    listener = bind(host, port)
    server = build(model, served_name=served_name, max_model_len=max_model_len, threads=threads, device=device, max_sequences=max_sequences)
    config = uvicorn.Config(server.app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=5)
    listener.listen(config.backlog)  # from here on a client that connects is answered
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    where = f"http://{shown}:{listener.getsockname()[1]}"
    print(f"polar engine serves {server.backend.name} ({server.backend.context} tokens) at {where}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises `ConfigError` if the address is not this machine's, or taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from error
    return bound
