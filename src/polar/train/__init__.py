"""GRPO on rows of real sessions: advantages, weights, loss. The algorithm knows no model, no engine and no file.

`advantages` and `weights` are numpy over a whole batch; `loss` is torch over whatever part of it fits. A batch's loss is
`sum(weight[t] * term[t])`, so that micro-batches add up to it exactly.
"""
