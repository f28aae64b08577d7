#!/bin/sh
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
