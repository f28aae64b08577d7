"""`polar demo`: the bundled tiny model learns a harness's protocol by GRPO, through the real CLIs, on a CPU.

The model knows the action protocol of one harness well and that of another hardly. It is evaluated under both on held-out tasks, trained
under the other, and evaluated again. `quick` shows the parts instead: a few sessions with what was captured of them, then one step.

`tasks` makes the tasks, `learn` has the settings of the run, which `polar.train` carries out, `report` and `plot` show what came of it;
`capture` is the first half of `quick`.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.console import Console

from polar.errors import ConfigError

NEEDED = ("torch", "transformers")
SUMMARY, PLOT = "summary.json", "plot.svg"


@dataclass(frozen=True, slots=True)
class Choice:
    """What the demo is asked for. `sessions`: of the first half of `quick`. `steps` of `None`: as many as the demo has. `shuffled`: the
    control, whose rewards are shuffled within each group. `program`: how the user calls this command, for the hints at the end."""

    quick: bool = False
    sessions: int = 8
    seed: int = 0
    steps: int | None = None
    shuffled: bool = False
    output: Path | None = None
    program: str = "polar"


def run(choice: Choice, console: Console | None = None) -> int:
    """Runs the demo, prints it, and leaves everything in a folder (default: a new one in `runs/`): `summary.json` and `plot.svg` among it.

    Returns 0 when the machinery worked, whatever was learned; 1 where a session made no model call at all; 130 when
    it was stopped before its last step. Raises `PolarError` where a part
    could not do its work, `ConfigError` for a folder that holds something and for what is not installed.
    """
    if choice.sessions < 1:
        raise ConfigError("--sessions must be at least 1")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"polar demo needs {' and '.join(missing)}: pip install -e '.[demo]' (in Polar's folder)")
    began = time.monotonic()
    folder = _folder(choice.output)
    console = console or Console()
    code = 0
    if choice.quick:
        from polar.demo.capture import capture

        code = capture(console, choice.sessions, folder, choice.seed, choice.program)
    stopped = _learn(console, choice, folder, began)
    console.print(f"[dim]{time.monotonic() - began:.0f} s in all[/]", highlight=False)
    return 130 if stopped else code


def _learn(console: Console, choice: Choice, folder: Path, began: float) -> bool:
    """Whether it was stopped before it was done."""
    from dataclasses import replace

    from polar.demo import learn, report
    from polar.demo.screen import DemoScreen
    from polar.harness import named
    from polar.train.run import train

    size = learn.QUICK if choice.quick else learn.Size()
    if choice.steps is not None:
        size = replace(size, steps=choice.steps)
    config = learn.settings(folder, size, seed=choice.seed, shuffled=choice.shuffled)
    title = named(learn.LEARNED).title
    steps = "one step" if size.steps == 1 else f"{size.steps} steps"
    known = named(learn.KNOWN).title
    console.print(
        f"\n[bold]GRPO[/]: {steps} under {title}, whose protocol {learn.MODEL} hardly knows, and, as often, under {known}, whose "
        f"protocol it knows; {size.samples} sessions a group"
    )
    if choice.shuffled:
        console.print("[yellow]control: rewards are shuffled within each group, so nothing can be learned from them[/]")
    with DemoScreen(console, size.steps) as screen:
        ran = train(config, progress=screen, tell=screen.evaluated)
    summary = report.summarise(learn.read(folder, config), seconds=time.monotonic() - began)
    (folder / SUMMARY).write_bytes(orjson.dumps(summary.to_json(), option=orjson.OPT_INDENT_2) + b"\n")
    console.print()
    report.show(console, summary)
    if summary.sides:
        (folder / PLOT).write_text(report.plot(summary), encoding="utf-8")
        console.print(f"\nThe curve: {folder / PLOT}", soft_wrap=True, highlight=False)
    where = folder / "run"
    console.print(
        f"All of it: {folder} (checkpoint: {where / 'checkpoints'}, sessions: {where / 'rollout'})", soft_wrap=True, highlight=False
    )
    return ran is not None and ran.ended == "stopped"


def _folder(output: Path | None) -> Path:
    folder = output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; name another with --output")
    return _made(folder)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder.resolve()
