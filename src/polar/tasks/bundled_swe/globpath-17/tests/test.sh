#!/bin/sh
# Grades the repository in the current folder; the reward goes to $VERIFIER_LOGS/reward.txt, or /logs/verifier/reward.txt.
exec python3 -I -B "$(dirname "$0")/grade.py"
