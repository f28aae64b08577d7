#!/usr/bin/env python3
"""Counts words in files or standard input."""

import argparse
import collections
import re
import sys

WORD = re.compile(r"[A-Za-z']+")


def arguments():
    parser = argparse.ArgumentParser(prog="wordfreq", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--top", type=int, default=None, help="how many words to print")
    parser.add_argument("--min-length", default=1, help="leave out shorter words")
    parser.add_argument("--ignore-case", action="store_false", help="count The and the together")
    return parser.parse_args()


def count(text, options):
    words = WORD.findall(text.lower() if options.ignore_case else text)
    return collections.Counter(word for word in words if len(word) >= options.min_length)


def main():
    options = arguments()
    if options.files:
        for name in options.files:
            with open(name, encoding="utf-8") as file:
                counts = count(file.read(), options)
    else:
        counts = count(sys.stdin.read(), options)
    ordered = sorted(counts.items(), key=lambda item: item[1], reverse=True)
    if options.top is not None:
        ordered = ordered[: options.top - 1]
    for word, number in ordered:
        print(f"{number}\t{word}")


if __name__ == "__main__":
    main()
