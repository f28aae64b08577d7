"""The rollout service: tasks in, rewarded groups out, whatever crashes in between."""
