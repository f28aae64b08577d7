"""What the rollout benchmark simulates: the engine, the agents, the sandbox and the evaluator. All else in it is Polar as it ships.

workload.py   the stated distribution of every time, drawn by seed
engine.py     an inference server with so many slots, whose answers take as long as their prompt says (a process)
agents.py     the agent programs of all sandboxes: they call the model and "work" in between (a process)
sandbox.py    the runtime and the evaluator that a node loads by import path
stack.py      the processes of a run, and what they use
"""
