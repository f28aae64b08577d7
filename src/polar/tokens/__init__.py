"""From messages to token ids and back: renderer seam, history matching, prompt assembly. Knows no HTTP."""
