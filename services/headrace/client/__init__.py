"""The client: what producers import.

    from headrace.client import Client

    with Client() as client:                      # or: async with AsyncClient() as client
        receipt = client.submit("prompts.jsonl", job="nightly")
        client.wait(receipt.job)
        for result in client.results(receipt.job):
            ...

Read `inputs` and `lines` (where lines come from), `formats` with `items` and `openai_batch` (what a line
says), `checking` and `feed` (the two passes), `storing` (how batches get stored once), `submit` (the whole).
"""

from headrace.client.aio import AsyncClient
from headrace.client.problems import InvalidLines, LineError
from headrace.client.submit import OnProgress, Progress, Receipt, SubmitOptions
from headrace.client.sync import Client
from headrace.client.writers import ResultFormat, jsonl_line

__all__ = [
    "AsyncClient",
    "Client",
    "InvalidLines",
    "LineError",
    "OnProgress",
    "Progress",
    "Receipt",
    "ResultFormat",
    "SubmitOptions",
    "jsonl_line",
]
