import re
import sys

CELL = re.compile(r"(?<!\\)\|")
DELIMITER = re.compile(r":?-+:?")
ROW = re.compile(r" {0,3}\|")


def cells(line):
    text = line.strip()[1:]
    parts = CELL.split(text)
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    return [part.strip() for part in parts]


def pad(text, width, style):
    if style == "right":
        return text.rjust(width)
    if style == "centre":
        left = (width - len(text)) // 2
        return " " * left + text + " " * (width - len(text) - left)
    return text.ljust(width)


def style_of(cell):
    if cell.endswith(":"):
        return "centre" if cell.startswith(":") else "right"
    return "left"


def rule(cell, width):
    left, right = cell.startswith(":"), cell.endswith(":")
    return ":" * left + "-" * (width - left - right) + ":" * right


def table(rows):
    head, delimiter, *body = [cells(row) for row in rows]
    count = len(head)
    body = [(row + [""] * count)[:count] for row in body]
    widths = [max(3, *(len(row[column]) for row in [head, *body])) for column in range(count)]
    styles = [style_of(cell) for cell in delimiter]
    lines = [[pad(*item) for item in zip(row, widths, styles)] for row in [head, *body]]
    lines.insert(1, [rule(cell, width) for cell, width in zip(delimiter, widths)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def begins(lines, at):
    if at + 1 >= len(lines) or not ROW.match(lines[at]) or not ROW.match(lines[at + 1]):
        return False
    delimiter = cells(lines[at + 1])
    return len(delimiter) == len(cells(lines[at])) and all(DELIMITER.fullmatch(cell) for cell in delimiter)


def main():
    lines = sys.stdin.read().split("\n")
    out, at, fenced = [], 0, False
    while at < len(lines):
        if lines[at].startswith("```"):
            fenced = not fenced
        elif not fenced and begins(lines, at):
            end = at + 2
            while end < len(lines) and ROW.match(lines[end]):
                end += 1
            out += table(lines[at:end])
            at = end
            continue
        out.append(lines[at])
        at += 1
    sys.stdout.write("\n".join(out))


main()
