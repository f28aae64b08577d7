import re
import sys

REFERENCE = re.compile(r"\$\{([^}:]*:)?([^}]*)\}")
ADD = re.compile(r"([^=:+][^=:]*?)\s*\+=\s*(.*)")
SET = re.compile(r"([^=:]+?)\s*[=:]\s*(.*)")


class Wrong(Exception):
    pass


def read(name, sections):
    """Merges a file into `sections`: name -> folded key -> [key, lines]."""
    section, last = sections.setdefault("", {}), None
    with open(name, encoding="utf-8") as file:
        for number, raw in enumerate(file, 1):
            text = raw.strip()
            if not text or text[0] in "#;":
                continue
            if raw[0].isspace():
                if last is None:
                    raise Wrong(f"{name}:{number}: not understood")
                last[1] += "\n" + text
                continue
            last = None
            if text.startswith("![") and text.endswith("]"):
                sections.pop(text[2:-1].strip(), None)
                section = None
            elif text.startswith("[") and text.endswith("]"):
                section = sections.setdefault(text[1:-1].strip(), {})
            elif section is None:
                raise Wrong(f"{name}:{number}: not understood")
            elif text.startswith("!") and text[1:].strip():
                section.pop(text[1:].strip().casefold(), None)
            elif match := ADD.fullmatch(text):
                last = section.setdefault(match[1].casefold(), [match[1], ""])
                last[1] = f"{last[1]}, {match[2]}" if last[1] else match[2]
            elif match := SET.fullmatch(text):
                last = section.setdefault(match[1].casefold(), [match[1], ""])
                last[1] = match[2]
            else:
                raise Wrong(f"{name}:{number}: not understood")


def expanded(sections, section, key, open_=()):
    def replaced(match):
        where = section if match[1] is None else match[1][:-1].strip()
        what = match[2].strip().casefold()
        if what not in sections.get(where, {}):
            raise Wrong(f"unknown reference: {match[0]}")
        if (where, what) in (*open_, (section, key)):
            raise Wrong(f"circular reference: {match[0]}")
        return expanded(sections, where, what, (*open_, (section, key)))

    return REFERENCE.sub(replaced, sections[section][key][1])


def main(names):
    sections = {}
    try:
        for name in names:
            read(name, sections)
        blocks = []
        for section, settings in sections.items():
            lines = [f"[{section}]"] if section else []
            for key, (shown, _) in settings.items():
                first, *rest = expanded(sections, section, key).split("\n")
                lines += [f"{shown} = {first}".rstrip(), *("    " + line for line in rest)]
            if lines:
                blocks.append("\n".join(lines) + "\n")
    except Wrong as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(blocks), end="")
    return 0


sys.exit(main(sys.argv[1:]))
