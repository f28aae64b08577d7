import collections
import json
import re
import sys

LINE = re.compile(
    r'(?P<client>\S+) \S+ \S+ \[[^\]]+\] "(?P<method>[A-Z]+) (?P<target>\S+) HTTP/[\d.]+" (?P<status>[1-5]\d\d) (?P<bytes>\d+|-) (?P<seconds>\d+(?:\.\d+)?)'
)


def main() -> None:
    skipped = total = requests = 0
    classes, paths = collections.Counter(), collections.Counter()
    clients = set()
    slowest, longest = None, -1.0
    with open(sys.argv[1], encoding="utf-8", errors="replace") as log:
        for line in log:
            if not line.strip():
                continue
            match = LINE.fullmatch(line.strip())
            if match is None:
                skipped += 1
                continue
            path = match["target"].partition("?")[0]
            requests += 1
            total += 0 if match["bytes"] == "-" else int(match["bytes"])
            classes[match["status"][0] + "xx"] += 1
            paths[path] += 1
            clients.add(match["client"])
            if float(match["seconds"]) > longest:
                slowest, longest = path, float(match["seconds"])
    top = sorted(paths.items(), key=lambda item: (-item[1], item[0]))[:3]
    report = {"requests": requests, "skipped": skipped, "bytes": total, "by_status": dict(classes)}
    print(json.dumps({**report, "top_paths": top, "slowest": slowest, "clients": len(clients)}))


main()
