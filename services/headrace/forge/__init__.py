"""The forge: functions over rows, and how a run batches them.

    from headrace.forge import RowError, function

    @function(version="1")
    def probe(rows: list[Document]) -> list[Answer | RowError]:
        ...

Read `function` (what is declared), `invoke` (one batch, in one process), `children` and `pool` (the processes that
run batches), `isolation` (a batch that fails is split until the guilty row stands alone), `batching` (which rows make
a batch), `local` (a run in this process). The worker hosts the same parts behind its engine protocol.
"""

from headrace.forge.function import Function, Retry, RowError, function, option

__all__ = ["Function", "Retry", "RowError", "function", "option"]
