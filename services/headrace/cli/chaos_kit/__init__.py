"""The fault kit behind `headrace chaos`: a job on a mesh of its own, broken on purpose, then proved.

Read `load` (the user's file as one that is submitted), `pace` (how long it lasts), `plan` (which faults, from a seed),
`local` (the mesh and its supervisor), `faults` (how each is done, and undone), `conductor` (when), `submitter` and
`sampler` (what runs beside), `verdict` (what is left to be proved), then `run`.
"""
