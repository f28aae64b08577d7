import collections
import heapq
import sys


def read(lines):
    needs = {}
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        left, colon, right = line.partition(":")
        if not colon or len(left.split()) != 1:
            print(f"line {number}: expected TARGET: DEPENDENCIES", file=sys.stderr)
            sys.exit(2)
        needs.setdefault(left.strip(), set()).update(right.split())
        for name in right.split():
            needs.setdefault(name, set())
    return needs


def order(needs):
    users = collections.defaultdict(list)
    for name, its in needs.items():
        for other in its:
            users[other].append(name)
    left = {name: len(its) for name, its in needs.items()}
    ready = [name for name, count in left.items() if not count]
    heapq.heapify(ready)
    done = []
    while ready:
        done.append(heapq.heappop(ready))
        for user in users[done[-1]]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, user)
    return done, {name for name, count in left.items() if count}


def cycle_from(start, needs, among):
    """A shortest cycle through `start` over names not before it, the first of the equally long; None where there is none."""
    distance = {start: 0}
    users = collections.defaultdict(list)
    for name in among:
        for other in needs[name]:
            users[other].append(name)
    queue = collections.deque([start])
    while queue:  # steps from any name to `start`
        name = queue.popleft()
        for user in users[name]:
            if user >= start and user not in distance:
                distance[user] = distance[name] + 1
                queue.append(user)
    path, at = [start], start
    while True:
        steps = [name for name in needs[at] if name in distance]
        if not steps:
            return None
        best = min(steps, key=lambda name: (distance[name], name))
        path.append(best)
        if best == start:
            return path
        at = best


def main():
    needs = read(sys.stdin)
    done, stuck = order(needs)
    if stuck:
        cycles = [found for found in (cycle_from(name, needs, stuck) for name in sorted(stuck)) if found]
        shortest = min(cycles, key=lambda path: (len(path), path))
        print("cycle: " + " -> ".join(shortest), file=sys.stderr)
        sys.exit(1)
    print("\n".join(done))


main()
