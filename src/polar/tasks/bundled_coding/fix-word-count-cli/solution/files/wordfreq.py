#!/usr/bin/env python3
"""Counts words in files or standard input."""

import argparse
import collections
import re
import sys

WORD = re.compile(r"[A-Za-z']+")


def natural(text):
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def arguments():
    parser = argparse.ArgumentParser(prog="wordfreq", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--top", type=natural, default=None, help="how many words to print")
    parser.add_argument("--min-length", type=natural, default=1, help="leave out shorter words")
    parser.add_argument("--ignore-case", action="store_true", help="count The and the together")
    return parser.parse_args()


def count(text, options):
    words = WORD.findall(text.lower() if options.ignore_case else text)
    return collections.Counter(word for word in words if len(word) >= options.min_length)


def main():
    options = arguments()
    status = 0
    counts = collections.Counter()
    if not options.files:
        counts = count(sys.stdin.read(), options)
    for name in options.files:
        try:
            with open(name, encoding="utf-8") as file:
                counts += count(file.read(), options)
        except FileNotFoundError:
            print(f"wordfreq: {name}: no such file", file=sys.stderr)
            status = 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for word, number in ordered[: options.top]:
        print(f"{number}\t{word}")
    return status


if __name__ == "__main__":
    sys.exit(main())
