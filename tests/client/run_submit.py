"""Submit a file as a process of its own: URL FILE JOB PATIENCE_S. Prints the receipt or the error; exit 0 or 1."""

import asyncio
import sys
from pathlib import Path

import msgspec

from headrace.client import AsyncClient
from headrace.contracts.errors import HeadraceError


async def main(url: str, source: str, job: str, patience_s: float) -> int:
    async with AsyncClient(url) as client:
        try:
            receipt = await client.submit(source, job=job, patience_s=patience_s)
        except HeadraceError as e:
            print(msgspec.json.encode({"error": {"code": e.code, "message": str(e)}}).decode())
            return 1
        # Not `ru_maxrss`: that begins with what the parent had when it forked.
        peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
        print(msgspec.json.encode({**msgspec.structs.asdict(receipt), "peak_mib": peak}).decode())
        return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))))
