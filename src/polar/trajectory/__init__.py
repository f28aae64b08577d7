"""From completions to training rows: forest, builders, ledger, drift report, credit, validation. Pure: no I/O, no store, no trainer."""
