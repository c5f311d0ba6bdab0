"""`headrace up`: a foreground supervisor of one machine's mesh, each service in its own process.

Read `lock` (one supervisor a folder), `layout` (what lies where), `plan` (which processes), `tether` (why
none outlives its supervisor), `child` (one process), `backoff`, then `supervisor` (start, restart, drain).
"""
