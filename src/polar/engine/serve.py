"""`polar engine`: loads a model and serves it."""

from __future__ import annotations

from pathlib import Path

from polar.engine.server import Server
from polar.engine.text import load_text

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
    """Serves until interrupted."""
    import uvicorn

    server = build(model, served_name=served_name, max_model_len=max_model_len, threads=threads, device=device, max_sequences=max_sequences)
    print(f"polar engine serves {server.backend.name} ({server.backend.context} tokens) at http://{host}:{port}", flush=True)
    uvicorn.run(server.app, host=host, port=port, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=5)
