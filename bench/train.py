"""How fast a step is: packed against padded, merged rows against one a request, Polar against TRL, in one run on one machine.

    python bench/train.py [--device auto|cpu|cuda] [--model FOLDER] [--repeats 3] [--out FILE]

Every way takes the same rows through the same model to the same kind of step (log-probabilities, clipped loss, backward pass, clipping,
AdamW), and trains the same tokens:

* `padded`: one row beside the other, filled up to the longest, which is what a batch of transformers is;
* `packed`: rows end to end, attention inside rows;
* `polar`: what the trainer does by itself: packed, and every beginning that rows have in common once;
* `TRL`: `GRPOTrainer.compute_loss` on the same rows, its prompts filled up in front and its completions behind.

`sessions` are conversations of many requests, made into rows by the real builders: `prefix_merging` (a conversation is one row) and
`per_request` (every request is one, with all that went before it). Their trained tokens are the same.

On a CPU all of it runs in one thread of one process and time is that thread's, the least of the repeats: other programs only ever add to
it. On a GPU it is wall time between synchronisations, in bfloat16. Model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B) counts what
the forward and backward pass of the rows' distinct ids need, once, against the GPU's data sheet; on a CPU, against a matrix product.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from polar.chat import Message
from polar.harness import Tag
from polar.records import Completion, Session
from polar.train.forest import plant
from polar.train.learner import Learner, Optimisation
from polar.train.logprobs import token_logprobs
from polar.train.policy import Policy, Way
from polar.train.rows import Row, row_of
from polar.trajectory import Forest, PerRequest, PrefixMerging, Recipe, Trace

LR = 1e-6
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165, "B200": 2250}
"""Dense bfloat16 products, by the makers' data sheets."""


@dataclass(frozen=True)
class Size:
    """Of the model, and of the rows by it."""

    name: str
    config: dict[str, int]
    dtype: torch.dtype
    row: int
    """Ids of a row."""
    rows: int


CPU = Size(
    "2.6 million parameters, float32",
    {
        "vocab_size": 4096,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
    },
    torch.float32,
    row=640,
    rows=8,
)
CUDA = Size(
    "Qwen3-0.6B's shape, bfloat16",
    {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    torch.bfloat16,
    row=2048,
    rows=8,
)


@dataclass(frozen=True)
class Shape:
    """Rows to train on. `whole`: whether they are few enough to go side by side, padded or in TRL."""

    name: str
    rows: list[Row]
    whole: bool = True

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))

    @property
    def trained(self) -> int:
        return sum(len(row.places) for row in self.rows)


# --- rows


def made(random: np.random.Generator, length: int, prompt: np.ndarray, vocabulary: int) -> Row:
    """A row behind `prompt`: runs of sampled ids with observations between, a third of it trained."""
    ids = np.concatenate([prompt, random.integers(0, vocabulary, max(16, length - len(prompt)))])
    places = np.array([place for place in range(len(prompt), len(ids)) if place // 32 % 3 == 0 or place == len(ids) - 1])
    recorded = torch.full((len(places),), -float(np.log(vocabulary)))
    return Row(torch.from_numpy(ids), torch.from_numpy(places), recorded, torch.full((len(places),), 1e-3), float(random.normal()))


def shapes(size: Size, vocabulary: int) -> list[Shape]:
    random = np.random.default_rng(0)

    def new(count: int) -> np.ndarray:
        return random.integers(0, vocabulary, count)

    even = [made(random, size.row, new(size.row // 4), vocabulary) for _ in range(size.rows)]
    lengths = (size.row * np.clip(random.lognormal(-0.9, 0.9, size.rows), 0.08, 2.5)).astype(int)
    ragged = [made(random, int(length), new(int(length) // 4), vocabulary) for length in lengths]
    prompt = new(size.row * 3 // 4)
    group = [made(random, size.row, prompt, vocabulary) for _ in range(size.rows)]
    return [Shape("rows of one length", even), Shape("ragged rows", ragged), Shape("a group behind one prompt", group)]


def session(number: int, first: int, turns: int, sampled: int, observed: int, vocabulary: int) -> tuple[Session, list[Completion]]:
    """A conversation whose every prompt begins with all that went before it. Half of the first prompt (`first` ids) is that of all
    sessions, as tools and system prompt are."""
    name, random = f"session-{number}", np.random.default_rng(number)

    def new(count: int) -> np.ndarray:
        return random.integers(0, vocabulary, count, dtype=np.int32)

    prompt = np.concatenate([np.arange(first // 2, dtype=np.int32) % vocabulary, new(first - first // 2)])
    messages: tuple[Message, ...] = (Message("system", "s"), Message("user", "u"))
    found = Session(name, b"", b""), list[Completion]()
    for turn in range(turns):
        ids = new(sampled)
        answer = Message("assistant", f"answer {turn}")
        found[1].append(
            Completion(
                session=name,
                number=turn,
                status="complete",
                dialect="openai_chat",
                mode="tokens",
                messages=messages,
                answer=answer,
                finish="stop",
                parent=turn - 1 if turn else None,
                prompt_ids=prompt,
                sampled_ids=ids,
                delivered=True,
                logprobs=np.full(sampled, -np.log(vocabulary), np.float32),
                policy_version="0",
                sampling={"temperature": 1.0},
            )
        )
        prompt = np.concatenate([prompt, ids, new(observed)])
        messages = (*messages, answer, Message("tool", "seen", tool_call_id="c"))
    return found


def sessions(size: Size, vocabulary: int) -> tuple[Shape, Shape]:
    """The same sessions as rows of `prefix_merging` and of `per_request`."""
    turns, each = 12, size.row // 5
    recipe = Recipe("bench", lambda _: Tag("main", "bench"))
    recorded = [session(number, size.row // 2, turns, each // 3, each - each // 3, vocabulary) for number in range(2)]

    def rows(builder: PrefixMerging | PerRequest) -> list[Row]:
        traces: list[Trace] = []
        for one, completions in recorded:
            traces += builder.build(Forest(one.id, completions), one, recipe).traces
        return [
            row_of(trace, weights=np.full(len(trace), 1e-3, np.float32), advantage=1.0 if trace.session.endswith("0") else -1.0)
            for trace in traces
        ]

    return Shape("sessions, prefix_merging", rows(PrefixMerging())), Shape("sessions, per_request", rows(PerRequest()), whole=False)


# --- steps


def new_model(size: Size, folder: str | None, device: torch.device) -> Any:
    torch.manual_seed(0)
    how = {"dtype": size.dtype, "attn_implementation": "sdpa"}
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, **how)
    else:
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(**size.config, max_position_embeddings=65_536, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1), **how
        )
    return model.to(device)


class Padded(Policy):
    """All rows of a micro-batch filled up to the longest, whatever that wastes."""

    def pack(self, rows: Sequence[Row], budget: int, way: Way | None = None) -> list[list[int]]:
        return [list(range(len(rows)))]

    def logprobs(self, rows: Sequence[Row], way: Way | None = None) -> list[torch.Tensor]:
        ids = pad_sequence([row.ids for row in rows], batch_first=True).to(self.device)
        hidden = self.backbone(input_ids=ids, use_cache=False).last_hidden_state
        chosen = torch.cat([hidden[line, row.places.to(self.device) - 1] for line, row in enumerate(rows)])
        targets = torch.cat([row.targets for row in rows]).to(self.device)
        found = token_logprobs(chosen, self.head_weight, targets, temperature=self.temperature)
        return list(torch.split(found, [len(row.places) for row in rows]))


def our_steps(model: Any, budget: int) -> dict[str, Callable[[Sequence[Row]], object]]:
    """The learner's own step, whole, in three ways; on a GPU with the float32 masters that a bfloat16 model is trained through."""
    policy, padded = Policy(model), Padded(model)
    learner = Learner(policy, Optimisation(lr=LR, token_budget=budget))

    def step(rows: Sequence[Row], by: Policy, way: Way | None) -> object:
        learner.policy = by
        return learner.step(rows, way)

    return {
        "padded": lambda rows: step(rows, padded, "padded"),
        "packed": lambda rows: step(rows, policy, "packed"),
        "polar": lambda rows: step(rows, policy, None),
    }


def their_step(model: Any, device: torch.device, folder: Path) -> Callable[[Sequence[Row]], object]:
    """TRL's loss as its trainer computes it, in one micro-batch, and AdamW on the model's own weights, the cheapest that there is."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), pad_token="a", eos_token="b")
    args = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_generations=2,
        temperature=1.0,
        bf16=False,
        use_cpu=device.type == "cpu",
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(model, lambda **_: [0.0], args, Dataset.from_list([{"prompt": "a"}] * 2), processing_class=words)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(rows: Sequence[Row]) -> object:
        model.train()
        starts = [int(row.places[0]) for row in rows]
        masks = []
        for row, start in zip(rows, starts, strict=True):
            mask = torch.zeros(len(row) - start, dtype=torch.int64)
            mask[row.places - start] = 1
            masks.append(mask)
        inputs = {
            "prompt_ids": pad_sequence([row.ids[:start] for row, start in zip(rows, starts, strict=True)], True, padding_side="left"),
            "prompt_mask": pad_sequence([torch.ones(start, dtype=torch.int64) for start in starts], True, padding_side="left"),
            "completion_ids": pad_sequence([row.ids[start:] for row, start in zip(rows, starts, strict=True)], True),
            "completion_mask": pad_sequence([torch.ones(len(mask), dtype=torch.int64) for mask in masks], True),
            "tool_mask": pad_sequence(masks, True),
            "advantages": torch.tensor([row.advantage for row in rows]),
            "num_items_in_batch": torch.tensor(sum(len(row.places) for row in rows)),
        }
        loss = trainer.compute_loss(model, {name: value.to(device) for name, value in inputs.items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


# --- measures


class Clock:
    """Seconds of work of `run`, and its peak of memory in bytes (on a GPU)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, run: Callable[[], object]) -> tuple[float, int]:
        gc.collect()
        if self.device.type == "cpu":
            begin = time.process_time()
            run()
            return time.process_time() - begin, 0
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - begin, torch.cuda.max_memory_allocated()


def peak(device: torch.device, given: float | None) -> tuple[float, str]:
    """FLOP a second that the device could do at best, and how that is known."""
    if given:
        return given * 1e12, "given"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, value in PEAK_TFLOPS.items():
            if key in name:
                return value * 1e12, f"data sheet of {key}"
    count = 8192 if device.type == "cuda" else 1024
    one = torch.randn(count, count, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    clock = Clock(device)
    clock(lambda: one @ one)
    return 2 * count**3 / min(clock(lambda: one @ one)[0] for _ in range(3)), "a matrix product, measured"


def flop(model: Any, rows: Sequence[Row]) -> float:
    """Of forward and backward pass over the rows' distinct ids: products with weights, attention inside rows, the head where trained."""
    config = model.config.get_text_config()
    forest = plant([row.ids for row in rows])
    embedding: int = config.vocab_size * config.hidden_size
    body: int = sum(one.numel() for one in model.parameters()) - embedding * (1 if config.tie_word_embeddings else 2)
    pairs = int((forest.positions + 1).sum())
    attention: float = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return 6.0 * body * len(forest) + attention + 6.0 * embedding * sum(len(row.places) for row in rows)


def compare(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    size = CUDA if device.type == "cuda" else CPU
    clock = Clock(device)
    best, source = peak(device, arguments.peak_tflops)

    first = new_model(size, arguments.model, device)
    vocabulary = int(first.config.get_text_config().vocab_size)
    ways = our_steps(first, 2 * size.row * size.rows)
    if not arguments.no_trl:
        ways["TRL"] = their_step(new_model(size, arguments.model, device), device, Path(arguments.scratch))
    merged, single = sessions(size, vocabulary)
    print(f"{arguments.model or size.name} on {device}; best speed {best / 1e12:.3g} TFLOP/s ({source})\n", flush=True)
    print(f"{'rows':<26}{'way':<8}{'seconds':>9}{'trained/s':>11}{'ids/s':>10}{'MFU':>7}{'GiB':>7}", flush=True)
    found = []
    for shape in [*shapes(size, vocabulary), merged, single]:
        measured: dict[str, tuple[float, int]] = {}
        for repeat in range(arguments.repeats + 1):
            for way, step in ways.items():
                if way in ("padded", "TRL") and not shape.whole:
                    continue
                if repeat == 0 and device.type == "cpu" and shape.name != "rows of one length":
                    continue  # warm already
                try:
                    seconds, memory = clock(lambda step=step, rows=shape.rows: step(rows))  # type: ignore[misc]
                except torch.cuda.OutOfMemoryError:
                    print(f"{shape.name}: {way} runs out of memory", flush=True)
                    continue
                if repeat:
                    before = measured.get(way, (float("inf"), 0))
                    measured[way] = min(seconds, before[0]), max(memory, before[1])
        for way, (seconds, memory) in measured.items():
            row = {
                "rows": shape.name,
                "way": way,
                "seconds": seconds,
                "trained tokens/s": shape.trained / seconds,
                "ids/s": shape.tokens / seconds,
                "mfu": flop(first, shape.rows) / seconds / best,
                "peak bytes": memory,
            }
            found.append(row)
            print(
                f"{shape.name if way in ('padded', 'packed') and way == next(iter(measured)) else '':<26}{way:<8}{seconds:>9.3f}"
                f"{row['trained tokens/s']:>11,.0f}{row['ids/s']:>10,.0f}{row['mfu']:>7.1%}{f'{memory / 2**30:.2f}' if memory else '-':>7}",
                flush=True,
            )
    return found


def show(found: list[dict[str, Any]]) -> None:
    seconds = {(row["rows"], row["way"]): row["seconds"] for row in found}
    names = list(dict.fromkeys(row["rows"] for row in found))
    print("\nhow many times as fast")
    for name in names:
        ratios = [
            f"{a} {seconds[name, b] / seconds[name, a]:.2f} x {b}"
            for a, b in (("packed", "padded"), ("packed", "TRL"), ("polar", "TRL"))
            if (name, a) in seconds and (name, b) in seconds
        ]
        if ratios:
            print(f"  {name:<26}{', '.join(ratios)}")
    merged, single = "sessions, prefix_merging", "sessions, per_request"
    for what, way in (("prefix_merging against per_request, rows packed:", "packed"), ("the same with common beginnings once:", "polar")):
        if (single, way) in seconds and (merged, way) in seconds:  # on a small GPU one may have run out of memory
            print(f"  {what:<48} {seconds[single, way] / seconds[merged, way]:.2f} x")
    both = [name for name in names if {(name, "TRL"), (name, "packed")} <= seconds.keys()]
    slower = [name for name in both if seconds[name, "packed"] > seconds[name, "TRL"]]
    if any(row["way"] == "TRL" for row in found):
        print(f"  packed is slower than TRL on: {', '.join(slower) or 'none'}")
    print(f"  largest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--model", help="a folder; by default a small random model, on a GPU one of Qwen3-0.6B's shape")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-trl", action="store_true", help="where TRL is not installed")
    parser.add_argument("--peak-tflops", type=float, help="of the GPU, where it is not known")
    parser.add_argument("--scratch", default="/tmp/polar-bench", help="a folder that TRL may write to")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if arguments.device == "auto" else arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = compare(arguments, device)
    show(found)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
