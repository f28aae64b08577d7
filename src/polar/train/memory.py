"""A device, or a machine, whose memory is used up is one error, which says what takes less. Knows no settings file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from polar.errors import OutOfMemory

_MAIN_MEMORY = "DefaultCPUAllocator"
"""Torch has no error of its own for it: a `RuntimeError` that names the allocator."""


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raises `OutOfMemory` in place of torch's own error, whose page tells of allocators."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _MAIN_MEMORY not in str(error):
            raise
        asked = str(error).partition("ried to allocate ")[2].partition(". ")[0].strip()
        raise OutOfMemory(
            f"memory is used up{f' ({asked} more were asked for)' if asked else ''}. It takes less with a smaller token_budget, with "
            "gradient_checkpointing: true, and on several GPUs with sharding: full, and the same command goes on with them from the last "
            "checkpoint. LoRA takes less, too, but makes another run"
        ) from error
