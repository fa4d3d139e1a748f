"""A scripted server in a process of its own, to be killed: ``killable_server.py DATA_DIR STEP_SECONDS``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    from serving import run_server, text_script

    script = text_script("Hi there.", ends=True)
    with run_server(script=script, step_seconds=float(sys.argv[2]), data_dir=sys.argv[1]) as server:
        print(server.url, flush=True)
        time.sleep(600)
