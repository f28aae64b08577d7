"""Trainers' processes that start in no time: forked from a server that has the libraries loaded. Each is a process of its own, to be killed
as such."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_HERE = str(Path(__file__).parent)


def forked(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A started process that calls `target`, a function of one of the modules that the server has loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer_child", "trainer_live_child"])
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, (_HERE, before["PYTHONPATH"]))), "OMP_NUM_THREADS": "1"}
    try:
        process = context.Process(target=target, args=arguments)
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return process
