"""An HTTP client for a separate process, so that it takes no time from the server. It imports nothing of this package.

Reads a line ``["HOST", PORT]``, then lines ``["PATH", "BODY"]``. Posts each BODY to its PATH, and writes the seconds until the answer,
or the answer's text if its status is not 200.
"""

from __future__ import annotations

import http.client
import json
import sys
import time


def main() -> None:
    """Sends the requests on standard input, over one connection."""
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
