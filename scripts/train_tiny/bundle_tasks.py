"""Writes the bundled demo tasks as Harbor folders: python scripts/train_tiny/bundle_tasks.py

One training and one held-out instance of every family, the same ones each time.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from polar.tasks.files import FAMILIES, FileTask, instances
from polar.tasks.harbor import BUNDLED

SEED = 20
MANIFEST = """version = "1.0"

[metadata]
author_name = "Polar"
difficulty = "easy"
category = "files"
family = "{family}"
split = "{split}"

[metadata.polar]
plain = true

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0
"""
DOCKERFILE = "FROM debian:stable-slim\nWORKDIR /app\nCOPY files/ /app/\n"
TEST = """#!/bin/sh
# Passes if the folder holds exactly the files of expected/, trailing newlines aside.
expected=$(cd "$(dirname "$0")" && pwd)/expected
reward=1
for file in "$expected"/*; do
    name=$(basename "$file")
    if [ ! -f "$name" ]; then
        echo "missing: $name"
        reward=0
    elif [ "$(cat "$name")" != "$(cat "$file")" ]; then
        echo "wrong content: $name"
        reward=0
    fi
done
for file in *; do
    if [ -e "$file" ] && [ ! -f "$expected/$file" ]; then
        echo "not expected: $file"
        reward=0
    fi
done
logs=${VERIFIER_LOGS:-/logs/verifier}
mkdir -p "$logs"
echo "$reward" > "$logs/reward.txt"
"""


def write(task: FileTask, folder: Path) -> None:
    """One Harbor folder at `folder`, which must not exist."""
    split = "held_out" if task.held_out else "train"
    texts = {
        "instruction.md": task.instruction + "\n",
        "task.toml": MANIFEST.format(family=task.family, split=split),
        "environment/Dockerfile": DOCKERFILE if task.files else DOCKERFILE.rpartition("COPY")[0],
        "tests/test.sh": TEST,
        "solution/solve.sh": "#!/bin/sh\n" + task.solution,
    }
    texts |= {f"environment/files/{name}": text for name, text in task.files.items()}
    texts |= {f"tests/expected/{name}": text + "\n" for name, text in task.expected.items()}
    folder.mkdir(parents=True)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith(".sh"):
            path.chmod(0o755)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=BUNDLED)
    target: Path = parser.parse_args().target
    shutil.rmtree(target, ignore_errors=True)
    for held_out in (False, True):
        stream = instances(SEED, held_out=held_out)
        for task in (next(stream) for _ in FAMILIES):
            write(task, target / f"{task.family}-{'held-out' if held_out else 'train'}")


if __name__ == "__main__":
    main()
