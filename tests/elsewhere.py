"""The same code in other processes: what is derived from a seed may not depend on Python's salted hashes."""

import subprocess
import sys


def printed(code: str, *arguments: object) -> list[str]:
    """What the code prints in processes with different hash seeds."""
    return [
        subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    ]
