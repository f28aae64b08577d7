"""`make soak`: fault tests of any size, one after another, each by its seed. One that passes says what it saw; one that fails says what is
not as planned, and leaves its logs and databases in a folder."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from soak_parts import may_mount
from soak_plan import CODES, EVERYWHERE, make
from soak_run import carry_out

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import fetch_qwen3_tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--faults", type=int, help="Default: each kind twice.")
    parser.add_argument("--seed", type=int, action="append", help="Repeat it for several runs. Default: one that the clock gives.")
    parser.add_argument("--backend", action="append", help="local, bubblewrap, docker. Default: the first two.")
    parser.add_argument("--timeout", type=float, default=3000.0, help="Seconds for one run.")
    given = parser.parse_args()
    kinds = tuple(CODES) if may_mount() else EVERYWHERE
    if kinds == EVERYWHERE:
        print("not root: no disk is filled")
    backends = given.backend or ["local", "bubblewrap"]
    failed = 0
    for seed in given.seed or [int(time.time())]:
        plan = make(seed, given.sessions, faults=given.faults or 2 * len(kinds), kinds=kinds, backends=backends)
        folder = Path(tempfile.mkdtemp(prefix=f"polar-soak-{seed}-"))
        print(f"seed {seed}: {plan.sessions} sessions, {len(plan.faults)} faults", flush=True)
        try:
            report = asyncio.run(carry_out(plan, folder, fetch_qwen3_tokenizer(), timeout_s=given.timeout, say=_say))
        except AssertionError as error:
            failed += 1
            print(f"seed {seed} failed: {error}\nlogs and databases: {folder}/logs")
        else:
            print("\n".join(report.lines()))
            shutil.rmtree(folder)
    return 1 if failed else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
