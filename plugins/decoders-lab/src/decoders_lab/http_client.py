"""A client in a process of its own: run as a file, it imports nothing of ours, and so takes no time from the server that it asks.

Reads a line ``["HOST", PORT]``, then lines ``["PATH", "BODY"]``; answers each of these with the seconds that the request took.
"""

from __future__ import annotations

import http.client
import json
import sys
import time


def main() -> None:
    """Asks for what the lines of standard input say, over one connection."""
    lines = iter(sys.stdin.readline, "")
    connection = http.client.HTTPConnection(*json.loads(next(lines)))
    for line in lines:
        path, body = json.loads(line)
        begun = time.perf_counter()
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        seconds = time.perf_counter() - begun
        print(json.dumps(seconds if response.status == 200 else text.decode()), flush=True)


if __name__ == "__main__":
    main()
