"""`python -m tests.bench.agents_host FOLDER FIRST PAST`: a host of some of the benchmark's agents.

As `headrace agent run` does it; with HEADRACE_BENCH_PROFILE it writes there what its time was spent on.
"""

from __future__ import annotations

import cProfile
import os
import sys

from headrace.agent.service import AgentService
from headrace.mesh.service import run_service
from headrace.mesh.settings import load_settings
from tests.bench.agents_crew import make, name


def main() -> int:
    folder, first, past = sys.argv[1], *map(int, sys.argv[2:4])
    hosted = [make(name(n)) for n in range(first, past)]
    profile = os.environ.pop("HEADRACE_BENCH_PROFILE", "")
    run = lambda: run_service(lambda settings: AgentService(settings, hosted), load_settings(folder))
    if not profile:
        return int(run())
    profiler = cProfile.Profile()
    try:
        return int(profiler.runcall(run))
    finally:
        profiler.dump_stats(f"{profile}.{first}")


if __name__ == "__main__":
    sys.exit(main())
