"""Completion whose every third transaction of the ledger fails at its end, as on a disk that lets go of it."""

import itertools
import sys

import duckdb
import msgspec

from headrace.completion import projection
from headrace.completion.service import CompletionService
from headrace.mesh.service import run_service
from headrace.mesh.settings import Settings

whole = projection.project
passes = itertools.count(1)


def project(connection, records):
    found = whole(connection, records)
    if next(passes) % 3 == 0:
        raise duckdb.IOException("the disk let go")
    return found


if __name__ == "__main__":
    projection.project = project
    sys.exit(run_service(CompletionService, msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)))
