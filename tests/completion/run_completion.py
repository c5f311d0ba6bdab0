"""Run completion as the command does, with the settings that stand on standard input."""

import sys

import msgspec

from headrace.completion.service import CompletionService
from headrace.mesh.service import run_service
from headrace.mesh.settings import Settings

if __name__ == "__main__":
    sys.exit(run_service(CompletionService, msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)))
