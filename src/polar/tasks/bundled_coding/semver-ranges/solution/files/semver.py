import functools
import re
import sys

_NUMBER = r"(?:0|[1-9][0-9]*)"
_PRE = rf"(?:{_NUMBER}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_VERSION = re.compile(rf"({_NUMBER})\.({_NUMBER})\.({_NUMBER})(?:-({_PRE}(?:\.{_PRE})*))?(?:\+([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?")
_COMPARATOR = re.compile(r"(>=|<=|>|<|=|~|\^)?(\S+)")


def parse(text):
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    pre, build = (tuple(part.split(".")) if part else () for part in match.group(4, 5))
    return int(match[1]), int(match[2]), int(match[3]), pre, build


def _rank(version):
    major, minor, patch, pre, _ = version
    identifiers = [(0, int(one), "") if one.isdigit() else (1, 0, one) for one in pre]
    return (major, minor, patch), not pre, identifiers


def compare(a, b):
    left, right = _rank(parse(a)), _rank(parse(b))
    return (left > right) - (left < right)


def sort(versions):
    return sorted(versions, key=functools.cmp_to_key(compare))


def _bound(sign, version):
    major, minor, patch = version[:3]
    if sign == "~":
        return major, minor + 1, 0
    if major:
        return major + 1, 0, 0
    return (0, minor + 1, 0) if minor else (0, 0, patch + 1)


def _holds(version, sign, other):
    left, right = _rank(version), _rank(other)
    if sign in "~^":
        return left >= right and version[:3] < _bound(sign, other)
    return {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right, "=": left == right}[sign]


def _alternatives(expression):
    for part in expression.split("||"):
        words = part.split()
        if not words:
            raise ValueError(f"an empty alternative in {expression!r}")
        matches = [_COMPARATOR.fullmatch(word) for word in words]
        if None in matches:
            raise ValueError(f"not understood: {part.strip()!r}")
        yield [(match[1] or "=", parse(match[2])) for match in matches]


def satisfies(version, expression):
    parsed = parse(version)
    found = False
    for comparators in _alternatives(expression):
        named = not parsed[3] or any(other[3] and other[:3] == parsed[:3] for _, other in comparators)
        found = found or (named and all(_holds(parsed, *one) for one in comparators))
    return found


if __name__ == "__main__":
    chosen = sort(line.strip() for line in sys.stdin if line.strip() and satisfies(line.strip(), sys.argv[1]))
    print("".join(line + "\n" for line in chosen), end="")
    sys.exit(not chosen)
