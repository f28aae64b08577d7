"""Length-prefixed records: `5:hello,2:hi,`."""

DIGITS = "0123456789"


class RecordError(ValueError):
    """The text is malformed; `position` is the index of the first wrong character."""

    def __init__(self, message, position):
        super().__init__(f"{message} at {position}")
        self.position = position


def parse(text):
    """The payloads of all records in `text`."""
    payloads = []
    at = 0
    while at < len(text):
        start = at
        while at < len(text) and text[at] in DIGITS:
            at += 1
        if at == start:
            raise RecordError("expected a length", at)
        if at - start > 1 and text[start] == "0":
            raise RecordError("leading zero", start + 1)
        length = int(text[start:at])
        if at >= len(text) or text[at] != ":":
            raise RecordError("expected a colon", at)
        at += 1
        end = at + length
        if end >= len(text):
            raise RecordError("the text ends too early", len(text))
        if text[end] != ",":
            raise RecordError("expected a comma", end)
        payloads.append(text[at:end])
        at = end + 1
    return payloads
