from wrap import wrap

CASES = [
    (("to be or not to be", 10), "to be or\nnot to be"),
    (("one  two\n \nthree", 20), "one two\n\nthree"),
    (("a longer point", 9, "- ", "  "), "- a\n  longer\n  point"),
]
for arguments, expected in CASES:
    result = wrap(*arguments)
    print("ok" if result == expected else f"wrap{arguments} gives {result!r}, not {expected!r}")
