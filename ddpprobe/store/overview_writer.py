"""`python -m ddpprobe.store.overview_writer PATH`: the table on stdin (JSON) as a Parquet file.

The daemon starts it where it has pyarrow, which it does not import itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ddpprobe.rundir import paths
from ddpprobe.store.overview_file import write_overview


def main() -> None:
    """Write the file, all of it or nothing."""
    rows = json.load(sys.stdin)
    with paths.replacing(Path(sys.argv[1])) as fd, open(fd, "wb", closefd=False) as out:
        write_overview(rows, out)


if __name__ == "__main__":
    main()
