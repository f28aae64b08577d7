"""Fakes of the real edges (tokenizer, engine, sandbox, clock), shipped so that users can test without a network or a GPU."""
