"""Small file tasks, made by rule: the families that the bundled demo tasks and the tiny model's dialogues are drawn from.

Knows no harness, no model and no folder format. An instance is a pure function of its family and its words; `held_out`
splits instances by a hash of their instruction, so that no training script ever has to remember which ones were taken.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_NOUNS = """
    acorn amber apple arrow aspen autumn badger bamboo banana barley basil basket beacon beaver berry birch bottle
    branch bread breeze bridge bronze brook butter button cabin cactus camel candle canyon carbon carpet carrot castle
    cedar cherry circle cliff cloud clover cobalt coffee comet copper coral cotton cradle crane creek cricket crystal
    daisy desert diamond dolphin dragon eagle ember engine falcon feather fern field finch flame flower forest fossil
    fountain fox galaxy garden garnet ginger glacier grape gravel guitar hammer harbor hazel helmet heron hill honey
    horizon island ivory jacket jasmine jungle kettle ladder lagoon lantern lemon lily linen lizard lotus magnet mango
    maple marble meadow melon meteor mirror mountain mushroom needle nest nickel north oasis ocean olive onion opal
    orange orchid otter owl paper parrot peach pearl pebble pepper piano pillow pine planet plum pocket pond poppy
    prairie pumpkin quartz rabbit rain raven reef ribbon river robin rocket rope rose saddle sail salmon sand sapphire
    shadow shell silver sky snow sparrow spice spring star stone storm sugar summer sunset swan table temple thistle
    thunder tiger timber tulip tunnel turtle valley velvet violet walnut water wave whale wheat willow window winter
    wolf zebra
"""
WORDS: tuple[str, ...] = tuple(_NOUNS.split())
"""Common nouns; the tiny model's tokenizer holds each of them, with and without a leading space, as one token."""

SUFFIXES = ("txt", "md", "log")


@dataclass(frozen=True, slots=True)
class FileTask:
    """An instruction over a folder that holds `files`; it is done when the folder holds exactly `expected`.

    Contents are compared without trailing newlines. `solution` is a POSIX shell script that does the task. `words` are what the
    instance was made of, in the family's order.
    """

    family: str
    instruction: str
    files: Mapping[str, str]
    expected: Mapping[str, str]
    solution: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """Unique among instances of all families; fit for a folder's name."""
        return "-".join((self.family, *(word.replace(".", "-") for word in self.words)))

    @property
    def held_out(self) -> bool:
        """Whether the instance is for evaluation only: one in eight, by SHA-256 of its family and words, however it is worded."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 8 == 0


def write_text(name: str, first: str, second: str, wording: int = 0) -> FileTask:
    """A new file with a text that the instruction gives."""
    wordings = (
        f'Create the file "{name}" with the text "{first} {second}".',
        f'Write the text "{first} {second}" into a new file called "{name}".',
    )
    return FileTask(
        "write",
        wordings[wording],
        {},
        {name: f"{first} {second}"},
        f'echo "{first} {second}" > {name}\n',
        (name, first, second),
    )


def edit_word(name: str, before: str, after: str, left: str, right: str, wording: int = 0) -> FileTask:
    """One word of an existing file replaced; the words around it stay."""
    wordings = (
        f'In the file "{name}", replace the word "{before}" with "{after}".',
        f'Change "{before}" to "{after}" in the file "{name}".',
    )
    return FileTask(
        "edit",
        wordings[wording],
        {name: f"{left} {before} {right}\n"},
        {name: f"{left} {after} {right}"},
        f"sed -i s/{before}/{after}/ {name}\n",
        (name, before, after, left, right),
    )


def copy_file(source: str, target: str, first: str, second: str, wording: int = 0) -> FileTask:
    """A file under a second name; the source stays."""
    text = f"{first} {second}"
    wordings = (f"Copy the file {source} to {target} with a shell command.", f"Use the shell to make a copy of {source} called {target}.")
    return FileTask(
        "copy",
        wordings[wording],
        {source: text + "\n"},
        {source: text, target: text},
        f"cp {source} {target}\n",
        (source, target, first, second),
    )


def rename_file(source: str, target: str, first: str, second: str, wording: int = 0) -> FileTask:
    """A file under another name; the old name is gone."""
    text = f"{first} {second}"
    wordings = (
        f"Rename the file {source} to {target} with a shell command.",
        f"Use the shell to give the file {source} the new name {target}.",
    )
    return FileTask(
        "rename", wordings[wording], {source: text + "\n"}, {target: text}, f"mv {source} {target}\n", (source, target, first, second)
    )


def append_line(name: str, line: str, first: str, wording: int = 0) -> FileTask:
    """A line added at the end of a file."""
    wordings = (
        f"Append the line {line} to the file {name} with a shell command.",
        f"Use the shell to add the line {line} at the end of {name}.",
    )
    return FileTask(
        "append",
        wordings[wording],
        {name: f"{first}\n"},
        {name: f"{first}\n{line}"},
        f"echo {line} >> {name}\n",
        (name, line, first),
    )


def carry_text(source: str, target: str, first: str, second: str, wording: int = 0) -> FileTask:
    """A text that only the first file tells, written into another: takes two steps."""
    text = f"{first} {second}"
    wordings = (
        f'Read the file "{source}" and write its text into the new file "{target}".',
        f'Create the file "{target}" with the text that you find in the file "{source}".',
    )
    return FileTask(
        "carry",
        wordings[wording],
        {source: text},
        {source: text, target: text},
        f"cat {source} > {target}\n",
        (source, target, first, second),
    )


def replace_second(name: str, first: str, second: str, third: str, after: str, wording: int = 0) -> FileTask:
    """The second word of a file replaced; which one it is, only reading tells: takes two steps."""
    wordings = (
        f'Read the file "{name}", then replace its second word with "{after}".',
        f'Look into the file "{name}" and change the second word to "{after}".',
    )
    return FileTask(
        "second",
        wordings[wording],
        {name: f"{first} {second} {third}"},
        {name: f"{first} {after} {third}"},
        f"sed -i s/{second}/{after}/ {name}\n",
        (name, first, second, third, after),
    )


def _make(family: str, rng: random.Random) -> FileTask:
    """A random instance: distinct words, file names with a random suffix, either wording."""
    wording = rng.randrange(2)

    def named(word: str) -> str:
        return f"{word}.{rng.choice(SUFFIXES)}"

    a, b, c, d, e = rng.sample(WORDS, 5)
    match family:
        case "write":
            return write_text(named(a), b, c, wording)
        case "edit":
            return edit_word(named(a), b, c, d, e, wording)
        case "copy":
            return copy_file(named(a), named(b), c, d, wording)
        case "rename":
            return rename_file(named(a), named(b), c, d, wording)
        case "append":
            return append_line(named(a), b, c, wording)
        case "carry":
            return carry_text(named(a), named(b), c, d, wording)
        case "second":
            return replace_second(named(a), b, c, d, e, wording)
    raise ValueError(f"no family is called {family!r}; there are: {', '.join(FAMILIES)}")


FAMILIES = ("write", "edit", "copy", "rename", "append", "carry", "second")


def instances(seed: int, *, held_out: bool, families: tuple[str, ...] = FAMILIES) -> Iterator[FileTask]:
    """Endless instances of one side of the split, families in turn; the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        for family in families:
            task = _make(family, rng)
            while task.held_out is not held_out:
                task = _make(family, rng)
            yield task
