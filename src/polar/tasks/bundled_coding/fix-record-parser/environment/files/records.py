"""Length-prefixed records: `5:hello,2:hi,`."""


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
        while at < len(text) and text[at].isdigit():
            at += 1
        if at == start:
            raise RecordError("expected a length", at + 1)
        length = int(text[start:at])
        if at >= len(text) or text[at] != ":":
            raise RecordError("expected a colon", at + 1)
        at += 1
        payload = text[at : at + length - 1]
        at += length
        if at >= len(text) or text[at] != ",":
            raise RecordError("expected a comma", at + 1)
        payloads.append(payload)
    return payloads
