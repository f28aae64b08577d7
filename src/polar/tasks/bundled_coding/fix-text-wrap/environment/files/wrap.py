"""Breaks paragraphs into lines."""


def wrap(text, width, indent="", hanging=""):
    """`text` in lines of at most `width` characters."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(_paragraph(paragraph.split(), width, indent, hanging) for paragraph in paragraphs)


def _paragraph(words, width, indent, hanging):
    lines = []
    line = indent
    while words:
        word = words.pop(0)
        if len(line) + len(word) + 1 < width:
            line += word + " "
        elif len(word) > width:
            line += word[: width - len(line)]
            words.insert(0, word[width - len(line) :])
        else:
            lines.append(line)
            line = hanging + word + " "
    lines.append(line)
    return "\n".join(lines)
