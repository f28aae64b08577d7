"""Starts the real vLLM (its CPU build) for a test, and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from polar.folders import cache_dir
from polar.sockets import free_port


def vllm_python() -> Path:
    """`$POLAR_VLLM_PYTHON`, or the one that tests/real/install_vllm.sh makes."""
    path = Path(os.environ.get("POLAR_VLLM_PYTHON") or cache_dir() / "vllm" / "bin" / "python")
    if not path.exists():
        pytest.fail(f"there is no vLLM at {path}: run tests/real/install_vllm.sh, or set POLAR_VLLM_PYTHON")
    return path


@contextmanager
def vllm(model: Path, name: str, *options: str, context: int = 2048, start_timeout_s: float = 400.0) -> Iterator[str]:
    """Yields its URL; float32, sampling log-probabilities of the processed distribution unless `options` say otherwise."""
    port = free_port()
    command: Sequence[str] = [
        *(str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(context), "--enforce-eager", "--dtype", "float32"),
        *("--max-num-seqs", "16", "--generation-config", "vllm", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *options,
    ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", start_timeout_s, log.fileno())
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def _wait(process: subprocess.Popen[bytes], url: str, timeout_s: float, log: int) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    os.lseek(log, max(0, os.lseek(log, 0, os.SEEK_END) - 4000), os.SEEK_SET)
    pytest.fail(f"vLLM did not start:\n{os.read(log, 4000).decode(errors='replace')}")
