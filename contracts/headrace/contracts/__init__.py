"""The wire contracts of Headrace: messages, subjects, topology and codec.

Read in this order: `names` (what a token may be), `subjects` (where messages go), `topology` (the
streams and consumers that carry them), `generation` (how a model is asked), `messages` (what travels),
`api` (the front door), `codec` (bytes and headers). Nothing here imports anything but msgspec.
"""
