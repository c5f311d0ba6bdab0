"""`python -m tests.agent.run_agents FOLDER NAME…`: agents of the crew, until they are stopped or killed."""

from __future__ import annotations

import sys

from headrace.agent import load_agent
from headrace.agent.service import AgentService
from headrace.mesh.service import run_service
from headrace.mesh.settings import load_settings


def main() -> int:
    folder, *names = sys.argv[1:]
    agents = [load_agent(f"tests.agent.crew:{name}") for name in names]
    return run_service(lambda settings: AgentService(settings, agents), load_settings(folder))


if __name__ == "__main__":
    sys.exit(main())
