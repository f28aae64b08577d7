"""Samples many sequences at once with a transformers model, in one thread: the engine server's real `Backend`.

Each step runs every sequence that is decoding plus up to `prefill_tokens` of prompts that are not computed yet, as one
forward pass. A finished sequence's slot stays until its memory is needed, and a new prompt starts from the longest prefix that
any slot holds.
Weights are reloaded between sequences, never under one: new ones wait meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polar.engine import cache
from polar.engine.api import ApiError, Finish, Job, Step
from polar.engine.cache import Batch, Segment, Slot
from polar.engine.sampler import Row, sample

log = logging.getLogger("polar.engine")


@dataclass(slots=True, eq=False)
class Sequence:
    """One job in flight. `pending` are ids that are not computed yet (the prompt's rest, then the last sampled one)."""

    job: Job
    loop: asyncio.AbstractEventLoop
    out: asyncio.Queue[Step | Exception]
    pending: NDArray[np.int64]
    slot: Slot | None = None
    sampled: list[int] = field(default_factory=list)
    generator: torch.Generator | None = None
    cancelled: bool = False


class TransformersBackend:
    """`directory` is a model that `AutoModelForCausalLM` loads, with full attention in every layer.

    `max_sequences` run at once, the rest waits. `cache_tokens` bounds the tokens held in all slots together, those in flight excepted.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        eos_ids: tuple[int, ...],
        context: int | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_sequences: int = 32,
        prefill_tokens: int = 512,
        cache_tokens: int = 131072,
    ) -> None:
        from transformers import AutoModelForCausalLM

        cache.install()
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=cache.ATTENTION)
        self._model = model.to(device).eval()
        config = self._model.config
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if kinds:
            raise ValueError(f"{directory} has layers of kind {', '.join(sorted(kinds))}; this engine serves full attention only")
        self.name = name
        self.root = str(directory)
        self.context = min(context or config.max_position_embeddings, config.max_position_embeddings)
        self.cached_tokens = 0
        self._eos_ids = frozenset(eos_ids)
        self._device = torch.device(device)
        self._vocabulary = int(config.vocab_size)
        self._prefill_tokens = prefill_tokens
        self._cache_tokens = cache_tokens
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._slots = [Slot(config.num_hidden_layers, heads, size, dtype, self._device) for _ in range(2 * max_sequences)]
        self._max_sequences = max_sequences
        self._clock = 0
        self._counts = {"prompt_tokens_total": 0.0, "generation_tokens_total": 0.0, "steps_total": 0.0}
        self._inbox: queue.SimpleQueue[Sequence | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[Sequence] = []
        self._active: list[Sequence] = []
        self._errands: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._work, name="polar-engine", daemon=True)
        self._thread.start()

    # --- called from the event loop ------------------------------------------------------------------------------

    async def run(self, job: Job) -> AsyncGenerator[Step, None]:
        ids = np.asarray(job.prompt_ids, dtype=np.int64)
        if len(ids) == 0:
            raise ApiError(400, "the prompt is empty.", param="prompt")
        if ids.max() >= self._vocabulary:
            raise ApiError(400, f"token id {int(ids.max())} is out of the vocabulary of {self._vocabulary}.", param="prompt")
        generator = None
        if job.params.seed is not None:
            seed = (job.params.seed + job.index) % 2**63
            generator = torch.Generator(self._device).manual_seed(seed)
        sequence = Sequence(job, asyncio.get_running_loop(), asyncio.Queue(), ids, generator=generator)
        self._inbox.put(sequence)
        if not self._thread.is_alive():
            raise ApiError(503, "the engine is shutting down.")
        try:
            while True:
                step = await sequence.out.get()
                if isinstance(step, Exception):
                    raise step
                yield step
                if step.finish is not None:
                    return
        finally:
            sequence.cancelled = True

    async def reload(self, path: str | None) -> None:
        directory = Path(self.root if path is None else path)
        await self._errand(lambda: self._load(directory))

    async def reset_prefix_cache(self) -> None:
        await self._errand(self._forget)

    async def _errand(self, action: Callable[[], None]) -> None:
        """Runs `action` in the worker once no sequence is in flight."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except Exception as error:  # whatever it is, it belongs to the caller
                done.set_exception(error)
            else:
                done.set_result(None)

        self._inbox.put(run)
        await asyncio.wrap_future(done)

    def metrics(self) -> Mapping[str, float]:
        held = sum(slot.length for slot in self._slots)
        return {**self._counts, "cached_tokens_total": float(self.cached_tokens), "cache_tokens": float(held)}

    async def aclose(self) -> None:
        """Ends the worker; sequences in flight get an error."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 10.0)

    # --- the worker thread -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _work(self) -> None:
        while self._receive():
            try:
                self._turn()
            except Exception as error:  # a broken step must not leave its callers waiting forever
                log.exception("a step failed")
                self._fail_all(ApiError(500, f"the engine failed: {error}"))
        self._fail_all(ApiError(503, "the engine is shutting down."))

    def _turn(self) -> None:
        self._active = [sequence for sequence in self._active if not self._leave_if_cancelled(sequence)]
        if not self._active:
            errands, self._errands = self._errands, []
            for errand in errands:
                errand()
        if not self._errands:
            self._admit()
        if self._active:
            self._step()

    def _receive(self) -> bool:
        """Takes what has arrived; waits only if there is nothing to do. False at the end."""
        idle = not (self._active or self._waiting or self._errands)
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if item is None:
                return False
            if isinstance(item, Sequence):
                self._waiting.append(item)
            else:
                self._errands.append(item)

    def _leave_if_cancelled(self, sequence: Sequence) -> bool:
        if sequence.cancelled:
            self._release(sequence)
        return sequence.cancelled

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            sequence.slot.busy = False
            sequence.slot = None

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._max_sequences:
            sequence = self._waiting.pop(0)
            if sequence.cancelled:
                continue
            self._active.append(sequence)
            sequence.slot, reused = self._slot_for(sequence.pending)
            sequence.slot.busy = True
            self._counts["prompt_tokens_total"] += len(sequence.pending)
            self.cached_tokens += reused
            sequence.pending = sequence.pending[reused:]

    def _slot_for(self, ids: NDArray[np.int64]) -> tuple[Slot, int]:
        """A slot that holds the longest known prefix of `ids`, and its length; one token is always left to compute."""
        self._clock += 1
        source = max(self._slots, key=lambda slot: slot.common(ids))
        length = min(source.common(ids), len(ids) - 1)
        idle = [slot for slot in self._slots if not slot.busy]
        source.used = self._clock
        if not source.busy and length > 0 and 2 * length >= source.length:
            source.length = length
            slot = source
        else:
            empty = [slot for slot in idle if slot.length == 0]
            slot = empty[0] if empty else min(idle, key=lambda slot: slot.used)
            if slot is source and length > 0:
                slot.length = length
            else:
                slot.copy_prefix(source, length)
        slot.used = self._clock
        self._evict(slot)
        return slot, length

    def _evict(self, keep: Slot) -> None:
        idle = sorted((slot for slot in self._slots if not slot.busy and slot is not keep), key=lambda slot: slot.used)
        held = sum(slot.capacity for slot in idle)
        for slot in idle:
            if held <= self._cache_tokens:
                return
            held -= slot.capacity
            slot.clear()

    def _step(self) -> None:
        batch, ready, flat = Batch(), [], []
        budget = self._prefill_tokens
        for sequence in sorted(self._active, key=lambda item: len(item.pending)):
            count = min(len(sequence.pending), budget) if len(sequence.pending) > 1 else 1
            if count == 0:
                continue
            if len(sequence.pending) > 1:
                budget -= count
            assert sequence.slot is not None
            ids, sequence.pending = sequence.pending[:count], sequence.pending[count:]
            batch.segments.append(Segment(sequence.slot, sequence.slot.length, count))
            sequence.slot.append(ids)
            flat.append(ids)
            if not len(sequence.pending):
                ready.append((sequence, sum(map(len, flat)) - 1))
        hidden = self._forward(batch, np.concatenate(flat))
        self._counts["steps_total"] += 1
        if not ready:
            return
        logits = self._model.lm_head(hidden[0, [at for _, at in ready]]).float()
        rows = [Row(item.job.params, item.job.prompt_ids, item.sampled, item.generator) for item, _ in ready]
        steps = [
            (sequence, self._advance(sequence, choice.token_id, choice.logprob, choice.top))
            for (sequence, _), choice in zip(ready, sample(logits, rows), strict=True)
        ]
        self._counts["generation_tokens_total"] += len(steps)
        self._deliver(steps)

    def _forward(self, batch: Batch, ids: NDArray[np.int64]) -> torch.Tensor:
        """Hidden states [1, tokens, size] of the flat row of tokens."""
        positions = np.concatenate([np.arange(segment.start, segment.start + segment.count) for segment in batch.segments])
        hidden: torch.Tensor = self._model.model(
            input_ids=torch.from_numpy(ids).to(self._device).unsqueeze(0),
            position_ids=torch.from_numpy(positions).to(self._device).unsqueeze(0),
            use_cache=False,
            polar_batch=batch,
        ).last_hidden_state
        return hidden

    def _advance(self, sequence: Sequence, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> Step:
        params = sequence.job.params
        sequence.sampled.append(token)
        sequence.pending = np.array([token], dtype=np.int64)
        finish: Finish | None = None
        stop: int | None = None
        if token in self._eos_ids and not params.ignore_eos:
            finish = "stop"
        elif token in params.stop_token_ids:
            finish, stop = "stop", token
        elif len(sequence.sampled) >= params.max_tokens:
            finish = "length"
        if finish is not None:
            self._release(sequence)
            self._active.remove(sequence)
        return Step(token, logprob, top, finish, stop)

    def _deliver(self, steps: list[tuple[Sequence, Step]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Sequence, Step]]] = {}
        for item in steps:
            by_loop.setdefault(item[0].loop, []).append(item)
        for loop, items in by_loop.items():
            _tell(loop, items)

    def _fail_all(self, error: ApiError) -> None:
        for sequence in (*self._active, *self._waiting):
            if sequence.slot is not None:
                sequence.slot.clear()
            self._release(sequence)
            _tell(sequence.loop, [(sequence, error)])
        self._active, self._waiting = [], []

    def _forget(self) -> None:
        for slot in self._slots:
            slot.clear()

    def _load(self, directory: Path) -> None:
        """In place. Raises `ApiError` 400, with the old weights kept, where the checkpoint is another model's."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not directory.is_dir():
            raise ApiError(400, f"there is no folder {directory} on this machine", param="weights_path")
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ApiError(400, f"there are no safetensors in {directory}", param="weights_path")
        loaded: dict[str, torch.Tensor] = {}
        try:
            for file in files:
                loaded.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ApiError(400, f"{file} cannot be read: {error}", param="weights_path") from error
        own = self._model.state_dict()
        tied = bool(getattr(self._model.config, "tie_word_embeddings", False))
        missing = set(own) - set(loaded) - ({"lm_head.weight"} if tied else set())
        if missing or set(loaded) - set(own):
            raise ApiError(
                400, f"the checkpoint is another model's: {sorted(missing | (set(loaded) - set(own)))[:5]}", param="weights_path"
            )
        wrong = [name for name, tensor in loaded.items() if tensor.shape != own[name].shape]
        if wrong:
            raise ApiError(400, f"the checkpoint has other shapes: {wrong[:5]}", param="weights_path")
        if tied and "lm_head.weight" in loaded and not torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"]):
            raise ApiError(400, "the served model ties its embeddings, the checkpoint's lm_head differs from them", param="weights_path")
        for name, tensor in loaded.items():
            own[name].copy_(tensor)
        self._forget()


def _tell(loop: asyncio.AbstractEventLoop, items: list[tuple[Sequence, Step]] | list[tuple[Sequence, ApiError]]) -> None:
    def put() -> None:
        for sequence, step in items:
            sequence.out.put_nowait(step)

    with suppress(RuntimeError):  # its loop has ended: nobody waits any more
        loop.call_soon_threadsafe(put)
