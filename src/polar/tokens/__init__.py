"""From messages to token ids and back: renderer seam, history matching, prompt assembly. Knows no HTTP.

`plan` is the vocabulary. `path.TokenPath` is what a gateway uses, `history.History` one session's memory, `pointers` its references.
"""
