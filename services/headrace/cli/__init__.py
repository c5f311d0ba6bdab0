"""The `headrace` command: services, the supervisor of a local mesh, and what people ask of a job.

Read `main` (the list of commands), `exit_codes` (what each ending means), `target` (how a mesh is found),
then one file for each command. `supervisor/` is `headrace up`. Only this room draws on a terminal.
"""
