import re
import sys

OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
PATTERN = re.compile(
    r"""(?P<name>(?:password|passwd|token|api_key)['"]?[ \t]*[=:][ \t]*)(?:(?P<quote>['"])(?P<quoted>[^\n]*?)(?P=quote)|(?P<value>[^\s,;]+))"""
    r"|(?P<mail>(?<![A-Za-z0-9._%+-])[A-Za-z0-9][A-Za-z0-9._%+-]*@(?P<domain>(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,})(?![A-Za-z0-9-]))"
    rf"|(?P<ip>(?<![\d.]){OCTET}(?:\.{OCTET}){{3}}(?!\.?\d))"
    r"|(?P<card>(?<!\d)\d{4}(?P<gap>[ -]?)\d{4}(?P=gap)\d{4}(?P=gap)\d{4}(?!\d))",
    re.IGNORECASE,
)


def luhn(digits):
    doubled = [int(digit) * 2 if at % 2 == 0 else int(digit) for at, digit in enumerate(digits)]
    return sum(number - 9 if number > 9 else number for number in doubled) % 10 == 0


def replacement(match):
    if match["name"]:
        quote = match["quote"] or ""
        return f"{match['name']}{quote}[secret]{quote}"
    if match["mail"]:
        return f"{match['mail'][0]}***@{match['domain']}"
    if match["ip"]:
        return match["ip"] if match["ip"] in ("127.0.0.1", "0.0.0.0") else "[ip]"
    card = match["card"]
    if not luhn(re.sub(r"\D", "", card)):
        return card
    return re.sub(r"\d", "*", card[:-4]) + card[-4:]


sys.stdout.buffer.write(PATTERN.sub(replacement, sys.stdin.buffer.read().decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"))
