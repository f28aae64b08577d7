"""What the store costs a call: CPU (threads included) of looking up the parent and appending, in a conversation of 30,000 tokens.

    python bench/store.py

Prints figures; compares with `json.dumps` of the same completion's ids and messages, which stores nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "store"))

from store_samples import agent_session, raw_json, session

from polar.store import messages_to_json, open_store


async def hot_path() -> None:
    chain = agent_session(turns=60, total=32_000)
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(3):
            store = open_store(Path(folder) / f"{attempt}.db")
            await store.create_session(session())
            for completion in chain[:-10]:
                await store.append([completion])
            start = time.process_time()
            for completion in chain[-10:]:
                await store.completion("s", completion.number - 1)
                await store.append([completion])
            best = min(best, (time.process_time() - start) / 10)
            await store.aclose()
            size = (Path(folder) / f"{attempt}.db").stat().st_size
    last = chain[-1]
    start = time.process_time()
    json.dumps([last.prompt_ids.tolist(), last.sampled_ids.tolist(), last.logprobs.tolist(), messages_to_json(last.messages)])
    plain = time.process_time() - start
    raw = sum(map(raw_json, chain))
    print(f"parent + append {best * 1e3:.2f} ms of CPU a call; json.dumps of the completion alone {plain * 1e3:.2f} ms: {best / plain:.2f}")
    print(f"on disk {size:,} bytes; raw JSON of all calls {raw:,} bytes: 1/{raw / size:.0f}")


if __name__ == "__main__":
    asyncio.run(hot_path())
