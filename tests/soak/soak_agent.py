"""The agent of the fault tests, for any Python 3 without packages. What it does, it is told as JSON in its first argument.

It calls the model turn by turn. An answer that it has received to its end is witnessed: one line with the hash of its key and the answer's
nonce, in a folder of the test's that survives everything, then the share of its turns in `progress`, in its work folder.
"""

import hashlib
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
import uuid

TOLD = json.loads(sys.argv[1])
KEY = os.environ["POLAR_API_KEY"]
BASE = os.environ["POLAR_BASE_URL"].rstrip("/")
PATIENCE_S = 90.0
WITNESS = "{}/{}-{}.txt".format(TOLD["witness"], TOLD["task"], uuid.uuid4().hex)


class Refused(Exception):
    pass


class Unclear(Exception):
    """The connection broke, or the server is in trouble: worth another try."""


def ask(messages):
    body = {"model": os.environ["POLAR_MODEL"], "messages": messages, "max_tokens": 200, "stream": TOLD["stream"]}
    headers = {"content-type": "application/json"}
    if TOLD["dialect"] == "anthropic":
        path, headers["x-api-key"], headers["anthropic-version"] = "/v1/messages", KEY, "2023-06-01"
    else:
        path, headers["authorization"] = "/v1/chat/completions", "Bearer " + KEY
    request = urllib.request.Request(BASE + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return streamed(answer) if TOLD["stream"] else whole(json.load(answer))
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:500]
        if error.code in (429, 529) or error.code >= 500:
            raise Unclear(f"{error.code} {said}") from None
        raise Refused(f"{error.code} {said}") from None
    except (OSError, ValueError, EOFError) as error:
        raise Unclear(repr(error)) from None
    except Exception as error:  # http.client's own: a cut answer
        raise Unclear(repr(error)) from None


def whole(body):
    if TOLD["dialect"] == "anthropic":
        return "".join(block.get("text", "") for block in body["content"])
    return body["choices"][0]["message"]["content"]


def streamed(answer):
    text = ""
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return text
        event = json.loads(data)
        if event.get("type") == "error" or "error" in event:
            raise Unclear(data.decode())
        if event.get("type") == "message_stop":
            return text
        if event.get("type") == "content_block_delta":
            text += event["delta"].get("text", "")
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
    raise Unclear("the stream ended before its last event")


def turn(messages):
    ends, wait_s = time.monotonic() + PATIENCE_S, 0.2
    while True:
        try:
            return ask(messages)
        except Unclear as error:
            print("refused:", error, flush=True)
            if TOLD["kind"] == "gives_up":
                sys.exit(1)
            if TOLD["kind"] == "swallows":
                sys.exit(0)
            if time.monotonic() > ends:
                sys.exit(f"no answer in {PATIENCE_S:g} s")
            time.sleep(wait_s)
            wait_s = min(1.0, 2 * wait_s)


def witness(nonce):
    line = f"{hashlib.sha256(KEY.encode()).hexdigest()} {nonce}\n"
    opened = os.open(WITNESS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(opened, line.encode())
    os.close(opened)
    print("nonce", nonce, flush=True)


def note(share):
    """Even a full disk is waited for: what it does to a program is not what these tests are about."""
    while True:
        try:
            with open("progress.new", "w") as file:
                file.write(f"{share:.4f}")
            os.replace("progress.new", "progress")
            return
        except OSError as error:
            print("the disk:", error, flush=True)
            time.sleep(0.2)


def main():
    kind = TOLD["kind"]
    if kind == "dies":
        sys.exit(1)
    if kind == "says_nothing":
        return
    messages = [{"role": "user", "content": sys.stdin.read()}]
    done = 0
    while done < TOLD["turns"] or kind in ("goes_on", "is_killed"):
        try:
            text = turn(messages)
        except Refused as error:
            sys.exit(f"refused: {error}")
        [nonce] = re.findall(r"nonce-[0-9a-z-]+", text)
        witness(nonce)
        done += 1
        note(done / TOLD["of"])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Turn {done + 1}."}]
    if kind == "exits":
        sys.exit(1)
    if kind == "hangs":
        time.sleep(100000)


main()
