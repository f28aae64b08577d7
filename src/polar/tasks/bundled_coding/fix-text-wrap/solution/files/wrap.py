"""Breaks paragraphs into lines."""

import re


def wrap(text, width, indent="", hanging=""):
    """`text` in lines of at most `width` characters."""
    if width <= max(len(indent), len(hanging)):
        raise ValueError(f"a width of {width} leaves no room for text")
    paragraphs = [part.split() for part in re.split(r"\n[^\S\n]*\n", text)]
    return "\n\n".join(_paragraph(words, width, indent, hanging) for words in paragraphs if words)


def _paragraph(words, width, indent, hanging):
    lines = []
    start = line = indent
    for word in words:
        while word:
            joined = line + word if line == start else f"{line} {word}"
            if len(joined) <= width:
                line, word = joined, ""
            elif line != start:
                lines.append(line)
                start = line = hanging
            else:
                room = width - len(start)
                lines.append(start + word[:room])
                word = word[room:]
                start = line = hanging
    if line != start:
        lines.append(line)
    return "\n".join(lines)
