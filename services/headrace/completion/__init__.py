"""The completion service: lands results in DuckDB, keeps the states of jobs, and answers who asks.

It is the only writer of the data plane. Read `schema` (the tables), `store` (the one file and its
threads), `outcomes` (one batch, one transaction), `landing` and `jobs` (the two loops), then `accounting`.
"""
