"""A run from its settings: puts the parts together, starts what they need, trains, and ends all of it.

    from polar.train import TrainConfig, train
    summary = train(TrainConfig(model="tiny-qwen3", tasks="demo", steps=3))

Started again with the same output folder, it goes on where its last checkpoint is. Under `torchrun` or `accelerate launch` every process
calls this; rank 0 leads, the others follow its learner (`polar.train.parallel`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polar.tokens.tokenizer import load_tokenizer
from polar.train import checkpoints, loading, world
from polar.train.checkpoints import RunState
from polar.train.checks import check, check_groups, check_recorded, check_tasks
from polar.train.config import TrainConfig
from polar.train.curriculum import split
from polar.train.evaluation import Evaluations, Outcome
from polar.train.folder import RunFolder, locked, opened
from polar.train.learner import Learner
from polar.train.loading import LoraSettings
from polar.train.memory import enough_memory
from polar.train.metrics import open_metrics
from polar.train.parallel import Parallel, join
from polar.train.place import place_of
from polar.train.progress import Progress, Silent
from polar.train.requests import Requests
from polar.train.settings import setting
from polar.train.source import RecordedSource, ServiceSource
from polar.train.sync import Control, EngineAt, Exports, Gateways, Syncer
from polar.train.trainer import Parts, Summary, Trainer

Tell = Callable[[Outcome], None]

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What shared disks say that are mounted so."""


def train(config: TrainConfig, *, progress: Progress | None = None, tell: Tell = lambda outcome: None) -> Summary | None:
    """Trains until the run is done or stopped (SIGINT, SIGTERM). `tell` hears of each evaluation that is made.

    `None` on ranks that follow. Raises `PolarError`: `ConfigError` for settings that do not fit each other or the machine, `NotTrainable`
    where what comes cannot be trained on, `OutOfMemory`, and what the parts raise.
    """
    if os.environ.get("RANK", "0") == "0":  # the leader's machine has the model; the others need nothing of it
        check(config)
    quiet_transformers()
    with enough_memory(), join() as group:
        if not group.leads:
            if (told := group.broadcast(None)) is not None:
                group.follow(make_learner(config, group, *told))
            return None
        with contextlib.ExitStack() as stack:
            begins: tuple[Path | None] | None = None
            try:
                folder = stack.enter_context(opened(config))
                begins = (checkpoints.latest(folder.path / "checkpoints"),)
            finally:  # the others wait for it: they end where there is nothing but an error to tell
                group.broadcast(begins)
            place = begins[0]
            learner = make_learner(config, group, place)
            return asyncio.run(_train(config, folder, learner, place, progress or Silent(), tell))


async def _train(config: TrainConfig, folder: RunFolder, learner: Learner, place: Path | None, progress: Progress, tell: Tell) -> Summary:
    state = RunState() if place is None else checkpoints.restore(place, learner)
    if folder.begun:
        progress.say(f"going on in {folder.path} after step {state.batches}" + ("" if place else ": it has no checkpoint yet"))
    else:
        progress.say(f"everything goes to {folder.path}")
    async with AsyncExitStack() as stack:
        metrics = stack.enter_context(
            open_metrics(folder.path, config.metrics, resumed_step=state.batches if place else -1, config=config.model_dump(mode="json"))
        )
        if config.recorded is not None:
            parts = await asyncio.to_thread(_recorded, config, folder, state, learner, metrics, progress)
        else:
            parts = await stack.enter_async_context(_parts(config, folder, learner, metrics, progress, tell))
        trainer = Trainer(config, parts, folder.path, state)
        with stopping(trainer.stop, progress):
            return await trainer.run()


def _recorded(config: TrainConfig, folder: RunFolder, state: RunState, learner: Learner, metrics: Any, progress: Progress) -> Parts:
    assert config.recorded is not None
    source = RecordedSource(Path(config.recorded))
    check_groups(folder.path, source.groups, int(state.position.get("next_group", 0)))
    check_recorded(config, source.groups)
    return Parts(learner, source, metrics, progress=progress)


@asynccontextmanager
async def _parts(
    config: TrainConfig, folder: RunFolder, learner: Learner, metrics: Any, progress: Progress, tell: Tell
) -> AsyncIterator[Parts]:
    assert config.tasks is not None
    train, held_out = split(config.tasks)
    requests = Requests(config, train, held_out)
    if config.rollout.url is None:  # before anything is started; a service elsewhere checks what it knows
        requests.check()
    for edited in await asyncio.to_thread(check_tasks, folder.path, [*train, *held_out], config.rollout.runtime):
        progress.say(f"tasks: {edited} is not what it was when the run began: from here on it is rolled out as it is now")
    if not requests.evaluated and (config.evaluation.before or config.evaluation.after):
        progress.say("no task is held out, so nothing is evaluated (tasks.held_out)")
    base = place_of(config.model.name)
    here = await asyncio.to_thread(Path(base).is_dir)  # a hub's name is none
    tokenizer = load_tokenizer(Path(base)) if here else None
    async with AsyncExitStack() as stack:
        weights = stack.enter_context(weights_folder(config, folder, progress.say))
        running = await stack.enter_async_context(world.entered(config, base, requests.harnesses, folder.rollout, progress.say))
        syncer = Syncer(
            [_control(running.url, running.token)],
            _engines(config),
            drain_s=config.sync.drain_seconds,
            on_slow=config.sync.on_slow,
            load_timeout_s=config.sync.load_seconds,
            adapter=config.sync.adapter,
        )
        try:
            yield Parts(
                learner,
                ServiceSource(running.client, requests.training, folder.run_id, hear=lambda result: progress.session()),
                metrics,
                sync=syncer,
                exports=Exports(
                    weights,
                    tokenizer=Path(base) if tokenizer is not None else None,
                    adapter_only=config.sync.adapter is not None,
                ),
                evaluate=_evaluations(config, folder, running, requests, progress, tell) if requests.evaluated else None,
                progress=progress,
                tokenizer_hash=tokenizer.hash if tokenizer is not None else None,
                template_hash=tokenizer.template_hash if tokenizer is not None else None,
            )
        finally:
            await syncer.aclose()


@contextlib.contextmanager
def weights_folder(config: TrainConfig, folder: RunFolder, say: Callable[[str], None]) -> Iterator[Path]:
    """Where weights are written for the engines, by this run alone: each removes what it takes for an earlier version."""
    if config.sync.folder is None:
        yield folder.weights
        return
    place = Path(config.sync.folder).expanduser()
    place.mkdir(parents=True, exist_ok=True)  # for engines of other users, too
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(place, f"sync.folder: another run writes its weights to {place}; each needs a folder of its own"))
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            say(f"sync.folder: the disk of {place} has no locks ({error.strerror}): see to it that no other run writes there")
        yield place


def _evaluations(
    config: TrainConfig, folder: RunFolder, running: world.World, requests: Requests, progress: Progress, tell: Tell
) -> Evaluations:
    sessions = requests.evaluated * config.evaluation.samples
    return Evaluations(
        running.client,
        requests.evaluated,
        requests.evaluation,
        folder.run_id,
        folder.evaluations,
        passed=config.evaluation.passed,
        ks=config.evaluation.k,
        hear=lambda step, done: progress.evaluating(step, done, sessions),
        tell=tell,
    )


def _control(url: str, token: str | None) -> Gateways:
    return Control(url, token)


def _engines(config: TrainConfig) -> list[EngineAt] | None:
    """Those of the settings; `None`: those that the gateways name."""
    engine, mount = config.engine, config.sync.mount
    return None if engine.embedded else [EngineAt(url, engine.kind, engine.api_key, mount) for url in engine.urls]


def quiet_transformers() -> None:
    """Its bars of loaded weights would go over ours. The hub's client has a handler of its own: what it also gave to the root logger's
    would stand there twice."""
    from huggingface_hub.utils.logging import disable_propagation
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    disable_propagation()


def check_loads(config: TrainConfig) -> None:
    """Raises `ConfigError` for what `train` would refuse when it loads the model, as far as that takes no weights."""
    model = config.model
    with setting("model"):
        loading.check_loads(
            place_of(model.name),
            dtype=model.dtype,
            attention=model.attention,
            lora=None if model.lora is None else LoraSettings(**model.lora.model_dump()),
            gradient_checkpointing=model.gradient_checkpointing,
        )


def make_learner(config: TrainConfig, group: Parallel, place: Path | None = None) -> Learner:
    """The policy and its optimiser, new or with the weights of the checkpoint at `place` (`checkpoints.restore` does the rest). All ranks
    call it."""
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    model, base = config.model, place_of(config.model.name)
    how: dict[str, Any] = {"dtype": model.dtype, "attention": model.attention, "gradient_checkpointing": model.gradient_checkpointing}
    adapter: dict[str, Any] = {}
    if model.lora is not None:
        adapter = {"lora": LoraSettings(**model.lora.model_dump())} if place is None else {"adapter": place / "model"}
    path = base if place is None or model.lora is not None else str(place / "model")
    with setting("model"):
        policy = group.load(path, sharding=model.sharding, temperature=config.temperature, **how, **adapter)
    loss = config.make_loss()
    reference = None
    if loss.beta:
        reference = group.reference(policy, base, sharding=model.sharding, dtype=model.dtype, attention=model.attention)
    return group.learner(policy, config.make_optimisation(), loss, reference)


@contextlib.contextmanager
def stopping(stop: Callable[[], None], progress: Progress) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `stop`; the second ends the process where it stands, which a run survives."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def heard() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        progress.say("stopping: what is being done is finished, and a checkpoint written; the same signal again ends it at once")
        stop()

    try:
        for number in numbers:
            loop.add_signal_handler(number, heard)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread: whoever called us hears the signals
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
